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
from specdec.engine.blocks import BLOCK, BlockPool
from specdec.engine.engine import Engine
from specdec.engine.kv import NOWHERE, PoolFullError, Slots
from verifier_service.attached import Attached
from verifier_service.load import Load
from verifier_service.session import Session

log = structlog.get_logger()

MARGIN = 16
"""A session is let in only if this part of all blocks, or one for each running session, stays available."""


class Residence:
    """`run_ahead`: tokens a session may be ahead of what its client has read; `lose` hears of a session that is about
    to lose its memory."""

    def __init__(
        self, engine: Engine, pool: BlockPool, load: Load, run_ahead: int, lose: Callable[[Attached], None]
    ) -> None:
        self.pool = pool
        self.running: list[Attached] = []  # in order of arrival
        self._waiting: list[Attached] = []  # for memory, in order of precedence
        self._engine = engine
        self._load = load
        self._run_ahead = run_ahead
        self._lose = lose
        self._arrivals = itertools.count()

    @property
    def everybody(self) -> list[Attached]:
        """Those who have memory, and those who wait for it."""
        return [*self.running, *self._waiting]

    def enter(self, attached: Attached) -> None:
        """Let a session in as soon as there is memory for it."""
        attached.arrival = next(self._arrivals)
        attached.waiting_since = time.monotonic()
        insort(self._waiting, attached, key=lambda a: a.precedence)
        self._load.prompt_tokens += attached.session.tree.base
        self._count()

    def leave(self, session: Session, *, wipe: bool = False) -> None:
        """Forget a session and free its memory, whatever state it is in."""
        self._take_memory(session, wipe=wipe)
        self._waiting = [a for a in self._waiting if a.session is not session]
        self.running = [a for a in self.running if a.session is not session]
        self._count()

    def admit(self) -> None:
        """Give memory to who waits for it, in order, as far as it goes."""
        for attached in [a for a in self._waiting if not self.stalled(a)]:
            while not self._let_in(attached):
                stalled = [a for a in self.running if self.stalled(a)]
                if not stalled:
                    return
                self._preempt(stalled[-1])  # it has no use for its memory until its reader catches up

    def stalled(self, attached: Attached) -> bool:
        """Whether it is far ahead of its reader; `consumed` will wake the loop."""
        return attached.session.tree.base - attached.session.consumed > self._run_ahead

    def hold(self, attached: Attached) -> bool:
        """Memory up to the tip, if need be at the expense of the youngest; False if this is the youngest, or
        has just been preempted for another."""
        while attached.session.table is not None:
            try:
                attached.session.table.reserve(attached.session.tree.base)
            except PoolFullError:
                self._preempt(self.running[-1])
            else:
                return True
        return False

    def reserve_for(self, session: Session, nodes: list[Node]) -> None:
        """Room to accept candidates, if it is there for nothing."""
        missing = max((node.position + 1 for node in nodes), default=0) - len(session.slots)
        if 0 < missing <= self.pool.available * BLOCK:
            assert session.table is not None
            session.table.reserve(len(session.slots) + missing)

    def move(self, moves: list[tuple[int, int]]) -> None:
        """Keys and values from slot to slot."""
        if moves:
            pairs = np.asarray(moves)
            self._copy(pairs[:, 0], pairs[:, 1])

    def _let_in(self, attached: Attached) -> bool:
        session = attached.session
        try:
            source, target = session.settle_in(self.pool, min(len(self.running), self.pool.usable // MARGIN))
        except PoolFullError:
            return False
        self._waiting.remove(attached)
        insort(self.running, attached, key=lambda a: a.arrival)
        self._copy(source, target)
        now = attached.let_in = time.monotonic()
        session.pace.committed(session.tree.base, now)
        attached.queued += now - attached.waiting_since
        if not attached.preemptions:
            session.found = session.computed
            self._load.found_tokens += session.found
        self._count()
        return True

    def _preempt(self, attached: Attached) -> None:
        """Take a session's memory; its text is computed anew when there is room, before anyone new comes in."""
        self._lose(attached)
        self._take_memory(attached.session)
        attached.preemptions += 1
        attached.waiting_since = time.monotonic()
        self.running.remove(attached)
        insort(self._waiting, attached, key=lambda a: a.precedence)
        self._load.preemptions += 1
        self._count()
        log.info("preempted", tokens=attached.session.tree.base, running=len(self.running))

    def _take_memory(self, session: Session, *, wipe: bool = False) -> None:
        spoiled = session.leave(wipe=wipe)
        self._copy(np.full(len(spoiled), NOWHERE), spoiled)

    def _copy(self, source: Slots, target: Slots) -> None:
        if len(source):
            self._engine.copy(source, target)

    def _count(self) -> None:
        self._load.running, self._load.waiting = len(self.running), len(self._waiting)
        self._load.stalled = sum(self.stalled(attached) for attached in self._waiting)
