"""Who has memory: sessions wait for it in order of precedence, run while they have it, and may lose it again.

Of the loop's thread, like all that it keeps.
"""

from __future__ import annotations

import itertools
import time
from bisect import insort
from collections.abc import Callable

import numpy as np
import structlog

from specdec.decoding.tree import Node
from specdec.engine.engine import Engine
from specdec.engine.kv.blocks import BLOCK, BlockPool
from specdec.engine.kv.slots import PADDING_SLOT, PoolFullError, Slots
from verifier_service.running_session import RunningSession
from verifier_service.session import Session
from verifier_service.stats import VerifierStats

log = structlog.get_logger()

SPARE_SHARE = 16
"""A session is let in only if this part of all blocks, or one for each running session, stays available."""


class RunQueue:
    """`max_unread_tokens`: tokens a session may be ahead of what its client has read; `on_preempt` hears of a session
    that is about to lose its memory."""

    def __init__(
        self,
        engine: Engine,
        pool: BlockPool,
        stats: VerifierStats,
        max_unread_tokens: int,
        on_preempt: Callable[[RunningSession], None],
    ) -> None:
        self.pool = pool
        self.running: list[RunningSession] = []  # in order of arrival
        self._waiting: list[RunningSession] = []  # for memory, in order of precedence
        self._engine = engine
        self._stats = stats
        self._max_unread_tokens = max_unread_tokens
        self._on_preempt = on_preempt
        self._arrivals = itertools.count()

    @property
    def all(self) -> list[RunningSession]:
        """Those who have memory, and those who wait for it."""
        return [*self.running, *self._waiting]

    def add(self, entry: RunningSession) -> None:
        """Let a session in as soon as there is memory for it."""
        entry.arrival = next(self._arrivals)
        entry.waiting_since = time.monotonic()
        insort(self._waiting, entry, key=lambda a: a.precedence)
        self._stats.prompt_tokens += entry.session.tree.base
        self._count()

    def remove(self, session: Session, *, wipe: bool = False) -> None:
        """Forget a session and free its memory, whatever state it is in."""
        self._take_memory(session, wipe=wipe)
        self._waiting = [a for a in self._waiting if a.session is not session]
        self.running = [a for a in self.running if a.session is not session]
        self._count()

    def admit(self) -> None:
        """Give memory to who waits for it, in order, as far as it goes."""
        for entry in [a for a in self._waiting if not self.throttled(a)]:
            while not self._admit(entry):
                throttled = [a for a in self.running if self.throttled(a)]
                if not throttled:
                    return
                self._preempt(throttled[-1])  # it has no use for its memory until its reader catches up

    def throttled(self, entry: RunningSession) -> bool:
        """Whether it is far ahead of its reader; `consumed` will wake the loop."""
        return entry.session.tree.base - entry.session.consumed > self._max_unread_tokens

    def reserve_text(self, entry: RunningSession) -> bool:
        """Memory up to the tip, if need be at the expense of the youngest; False if this is the youngest, or
        has just been preempted for another."""
        while entry.session.table is not None:
            try:
                entry.session.table.reserve(entry.session.tree.base)
            except PoolFullError:
                self._preempt(self.running[-1])
            else:
                return True
        return False

    def reserve_candidates(self, session: Session, nodes: list[Node]) -> None:
        """Room to accept candidates, if it is there for nothing."""
        missing = max((node.position + 1 for node in nodes), default=0) - len(session.slots)
        if 0 < missing <= self.pool.available * BLOCK:
            assert session.table is not None
            session.table.reserve(len(session.slots) + missing)

    def copy_rows(self, moves: list[tuple[int, int]]) -> None:
        """Keys and values from slot to slot."""
        if moves:
            pairs = np.asarray(moves)
            self._copy(pairs[:, 0], pairs[:, 1])

    def _admit(self, entry: RunningSession) -> bool:
        session = entry.session
        try:
            source, target = session.allocate(self.pool, min(len(self.running), self.pool.usable // SPARE_SHARE))
        except PoolFullError:
            return False
        self._waiting.remove(entry)
        insort(self.running, entry, key=lambda a: a.arrival)
        self._copy(source, target)
        now = entry.admitted_at = time.monotonic()
        session.draft_timing.committed(session.tree.base, now)
        entry.queued += now - entry.waiting_since
        if not entry.preemptions:
            session.cached_tokens = session.computed
            self._stats.cached_tokens += session.cached_tokens
        self._count()
        return True

    def _preempt(self, entry: RunningSession) -> None:
        """Take a session's memory; its text is computed anew when there is room, before anyone new comes in."""
        self._on_preempt(entry)
        self._take_memory(entry.session)
        entry.preemptions += 1
        entry.waiting_since = time.monotonic()
        self.running.remove(entry)
        insort(self._waiting, entry, key=lambda a: a.precedence)
        self._stats.preemptions += 1
        self._count()
        log.info("preempted", tokens=entry.session.tree.base, running=len(self.running))

    def _take_memory(self, session: Session, *, wipe: bool = False) -> None:
        spoiled = session.free(wipe=wipe)
        self._copy(np.full(len(spoiled), PADDING_SLOT), spoiled)

    def _copy(self, source: Slots, target: Slots) -> None:
        if len(source):
            self._engine.copy(source, target)

    def _count(self) -> None:
        self._stats.running, self._stats.waiting = len(self.running), len(self._waiting)
        self._stats.throttled = sum(self.throttled(entry) for entry in self._waiting)
