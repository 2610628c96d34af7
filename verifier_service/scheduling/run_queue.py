"""The run queue: sessions wait for memory, run while they have it, and may lose it again.

Tenants share memory by their weights (`shares.py`); among sessions of one tenant, precedence decides.

It belongs to the step loop's thread, with all that it holds.
"""

from __future__ import annotations

import itertools
import time
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np
import structlog

from specdec.engine.engine import Engine
from specdec.engine.kv.blocks import BLOCK, BlockPool, BlockTable, blocks_freed
from specdec.engine.kv.slots import PADDING_SLOT, PoolFullError, Slots
from specdec.serving.errors import TooLateError
from verifier_service.backend.result import VerifyResult
from verifier_service.backend.stats import VerifierStats
from verifier_service.scheduling.memory_forecast import TextLengths, expected_growth
from verifier_service.scheduling.shares import Shares, who_counts, youngest_beyond, youngest_of_largest
from verifier_service.sessions.running_session import RunningSession
from verifier_service.sessions.session import Session

log = structlog.get_logger()


class RunQueue:
    """Sessions that have memory and sessions that wait for it. `max_unread_tokens`: tokens that a session may be ahead
    of what its client has read; `on_preempt` is called with a session that is about to lose its memory."""

    def __init__(
        self,
        engine: Engine,
        pool: BlockPool,
        stats: VerifierStats,
        max_unread_tokens: int,
        on_preempt: Callable[[RunningSession], None],
    ) -> None:
        self.pool = pool
        self.running: list[RunningSession] = []  # sessions that have memory, in order of arrival
        self._waiting: list[RunningSession] = []  # sessions that wait for memory
        self.shares = Shares()
        self.lengths = TextLengths()
        self._engine = engine
        self._stats = stats
        self._max_unread_tokens = max_unread_tokens
        self._on_preempt = on_preempt
        self._arrivals = itertools.count()

    @property
    def all(self) -> list[RunningSession]:
        """All sessions: those that have memory, then those that wait for it."""
        return [*self.running, *self._waiting]

    def add(self, entry: RunningSession) -> None:
        """Queue a session: it is admitted as soon as there is memory for it."""
        entry.arrival = next(self._arrivals)
        entry.waiting_since = time.monotonic()
        self.shares.joined(entry, {each.tenant for each in self._waiting if not each.preemptions})
        self._waiting.append(entry)
        self._count()

    def remove(self, session: Session, *, wipe: bool = False) -> RunningSession | None:
        """Forget a session and free its memory, whatever state it is in. Return it; None if it is not there."""
        found = next((entry for entry in self.all if entry.session is session), None)
        if found is not None and found.computing_prompt and not found.preemptions:
            self.shares.got_prompt(found, session.computed - session.tree.base)  # only what is computed counts
        self._take_memory(session, wipe=wipe)
        if found is None:
            return None
        if found in self._waiting:
            self._waiting.remove(found)
        else:
            self.running.remove(found)
            found.had_memory += time.monotonic() - found.admitted_at
        self.shares.left(found)
        self._count()
        return found

    def admit(self) -> None:
        """Give memory to waiting sessions, in turn, until there is too little for the next one, now or by forecast.

        Throttled sessions are passed over while they wait, and preempted for others while they run; so are running
        sessions of a tenant that has more than its share. A text that would not be finished before its deadline is
        refused while it waits."""
        while (entry := self.shares.next(a for a in self._waiting if not self.throttled(a))) is not None:
            if error := self._too_late(entry):
                self.remove(entry.session)
                entry.responses.send(error)
                continue
            if not self._admit(entry):
                break
        self._count()

    def got_tokens(self, results: Sequence[tuple[RunningSession, VerifyResult]]) -> None:
        """Count what a step has added to sessions."""
        for entry, result in results:
            self.shares.got_tokens(entry, len(result.tokens))
        waiting = {entry.tenant for entry in self._waiting if not self.throttled(entry)}
        if results:
            self.shares.stepped(waiting.union(entry.tenant for entry, _ in results))

    def throttled(self, entry: RunningSession) -> bool:
        """True if the session is too far ahead of its reader; a `consumed` message will wake the loop."""
        return entry.session.tree.base - entry.session.consumed > self._max_unread_tokens

    def reserve_texts(self, entries: Iterable[RunningSession]) -> list[RunningSession]:
        """Reserve memory for the texts of running sessions up to their roots, and preempt some if need be. Return those
        that have memory then."""
        reserved = [entry for entry in entries if self._reserve_text(entry)]
        return [entry for entry in reserved if entry.session.table is not None]  # not preempted for a later one

    def reserve_ahead(self, session: Session, length: int) -> bool:
        """Reserve memory for a running text of `length` tokens; return False if that would take a preemption."""
        assert session.table is not None
        missing = length - len(session.slots)
        if missing > self.pool.available * BLOCK:
            return False
        if missing > 0:
            session.table.reserve(length)
        return True

    def copy_rows(self, kv_copies: list[tuple[int, int]]) -> None:
        """Copy keys and values from slot to slot."""
        if kv_copies:
            pairs = np.asarray(kv_copies)
            self._copy(pairs[:, 0], pairs[:, 1])

    def _too_late(self, entry: RunningSession) -> TooLateError | None:
        """Return the error for a session that is not begun, since it would not be finished in time; None: it would."""
        request = entry.session.request
        return None if entry.preemptions else self._stats.too_late(request.max_tokens, request.deadline, 0)

    def _reserve_text(self, entry: RunningSession) -> bool:
        """Reserve memory for a text. False if it has none, since it was itself to be preempted."""
        while entry.session.table is not None:
            try:
                entry.session.table.reserve(entry.session.tree.base)
            except PoolFullError:
                self._preempt(youngest_of_largest(self.running))
            else:
                return True
        return False

    def _admit(self, entry: RunningSession) -> bool:
        session = entry.session
        try:
            source, target = session.allocate(self.pool, partial(self._make_room, entry))
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
            self._stats.prompt_tokens += session.tree.base
            self._stats.cached_tokens += session.cached_tokens
            self._stats.queue_seconds.observe(now - entry.waiting_since)
            self.shares.got_prompt(entry, session.tree.base - session.computed)
        entry.timeline.event("admitted", cached_tokens=session.computed)
        entry.computing_prompt = True
        return True

    def _make_room(self, entry: RunningSession, blocks: int) -> None:
        """Preempt those that give way to `entry`, which waits, so that there is memory for it: `blocks` for its text,
        and what it and the running ones will take by forecast. PoolFullError, with nobody preempted, if there would be
        too little even so."""
        running, room = self.running, self.pool.available
        victims, tables = list[RunningSession](), list[BlockTable]()
        while (wanted := blocks if blocks > room else max(blocks, self._growth(entry, running))) > room:
            victim = self._next_victim(entry, running)
            if victim is None:
                raise PoolFullError(wanted * BLOCK, room * BLOCK)
            assert victim.session.table is not None
            victims.append(victim)
            tables.append(victim.session.table)
            running = [each for each in running if each is not victim]
            room = self.pool.available + blocks_freed(tables)
        for victim in victims:
            self._preempt(victim)

    def _next_victim(self, entry: RunningSession, running: list[RunningSession]) -> RunningSession | None:
        """Return who of the `running` ones loses its memory first for `entry`; None: nobody does."""
        throttled = [each for each in running if self.throttled(each)]
        if throttled:  # it cannot use its memory until its reader catches up
            return throttled[-1]
        return youngest_beyond(running, entry, entry.session.tree.base)

    def _growth(self, entry: RunningSession, running: list[RunningSession]) -> int:
        """Return how many blocks a session that is being admitted and the running ones will take. Those that would be
        preempted for it count only if they give back more than they take."""
        growth = expected_growth([*(each.session for each in running), entry.session], self.lengths)
        if all(each.tenant == entry.tenant for each in running):  # none of them gives way to it
            return growth
        counted = who_counts(running, entry, entry.session.tree.base)
        if len(counted) < len(running):
            growth = min(growth, expected_growth([*(each.session for each in counted), entry.session], self.lengths))
        return growth

    def _preempt(self, entry: RunningSession) -> None:
        """Take a session's memory; its text is computed anew when there is room, before new sessions of its tenant
        are admitted."""
        self._on_preempt(entry)
        self._take_memory(entry.session)
        entry.preemptions += 1
        entry.waiting_since = time.monotonic()
        entry.had_memory += entry.waiting_since - entry.admitted_at
        self.running.remove(entry)
        self._waiting.append(entry)
        self._stats.preemptions += 1
        self._count()
        entry.timeline.event("preempted", text_tokens=entry.session.tree.base)
        log.info("preempted", tokens=entry.session.tree.base, running=len(self.running))

    def _take_memory(self, session: Session, *, wipe: bool = False) -> None:
        to_wipe = session.free(wipe=wipe)
        self._copy(np.full(len(to_wipe), PADDING_SLOT), to_wipe)

    def _copy(self, source: Slots, target: Slots) -> None:
        if len(source):
            self._engine.copy(source, target)

    def _count(self) -> None:
        """Tell how many wait and run, and why."""
        self._stats.running, self._stats.waiting = len(self.running), len(self._waiting)
        self._stats.throttled = sum(self.throttled(entry) for entry in self._waiting)
        self._stats.new_of = Counter(entry.tenant for entry in self._waiting if not entry.preemptions)
