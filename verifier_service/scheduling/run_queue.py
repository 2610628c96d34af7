"""The run queue: sessions wait for KV memory, run while they hold it, and may be preempted.

Tenants share memory by weight (`shares.py`); within a tenant, precedence decides. The step loop's thread owns the queue
and everything in it.
"""

from __future__ import annotations

import itertools
import time
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import structlog

from specdec.engine.engine import Engine
from specdec.engine.kv.blocks import BLOCK, BlockPool, FreedBlocks
from specdec.engine.kv.slots import PADDING_SLOT, PoolFullError, Slots
from specdec.serving.errors import TooLateError
from verifier_service.backend.result import VerifyResult
from verifier_service.backend.stats import VerifierStats
from verifier_service.scheduling.memory_forecast import TextLengths, expected_growth
from verifier_service.scheduling.shares import TenantShares, competing_sessions, youngest_beyond, youngest_of_largest
from verifier_service.sessions.running_session import RunningSession
from verifier_service.sessions.session import VerifierSession

log = structlog.get_logger()

COPIED_AT_ONCE = 1024
"""Maximum slots in one copy."""

ADMISSION_RETRY_SECONDS = 0.05
"""Seconds until a session refused for lack of memory is tried again although no block has become available. A try walks
all blocks of the session's cached prefix: 0.8 ms at 32,000 tokens, which every step would pay."""


class _Refusal(NamedTuple):
    """Memory was too short for a waiting session."""

    arrival: int  # of the session
    available: int  # blocks
    until: float  # by `time.monotonic`


class RunQueue:
    """Running sessions (with memory) and waiting ones. `max_unread_tokens`: tokens a session may be ahead of its
    client's reading; `on_preempt` is called with a session about to be preempted."""

    def __init__(
        self,
        engine: Engine,
        pool: BlockPool,
        stats: VerifierStats,
        max_unread_tokens: int,
        on_preempt: Callable[[RunningSession], None],
    ) -> None:
        self.pool = pool
        self.running: list[RunningSession] = []  # sessions with memory, in order of arrival
        self._waiting: list[RunningSession] = []  # sessions without memory
        self.memory_shares = TenantShares()
        self.lengths = TextLengths()
        self._engine = engine
        self._stats = stats
        self._max_unread_tokens = max_unread_tokens
        self._on_preempt = on_preempt
        self._arrivals = itertools.count()
        self._refusal: _Refusal | None = None  # the last

    @property
    def all(self) -> list[RunningSession]:
        """All sessions: the running ones, then the waiting ones."""
        return [*self.running, *self._waiting]

    @property
    def ready(self) -> list[RunningSession]:
        """The running sessions that have tokens to compute and are not throttled."""
        return [entry for entry in self.running if entry.session.computable and not self.throttled(entry)]

    def add(self, entry: RunningSession) -> None:
        """Queue a session; it is admitted as soon as there is memory for it."""
        entry.arrival = next(self._arrivals)
        entry.waiting_since = time.monotonic()
        self.memory_shares.joined(entry, {other.tenant for other in self._waiting if not other.preemptions})
        self._waiting.append(entry)
        self._count()

    def remove(self, session: VerifierSession, *, wipe: bool = False) -> RunningSession | None:
        """Forget a session in any state and free its memory. Return it; None if it is unknown."""
        found = next((entry for entry in self.all if entry.session is session), None)
        if found is not None and found.computing_prompt and not found.preemptions:
            self.memory_shares.got_prompt(found, session.computed - session.tree.base)  # refund the uncomputed part
        self._take_memory(session, wipe=wipe)
        if found is None:
            return None
        if found in self._waiting:
            self._waiting.remove(found)
        else:
            self.running.remove(found)
            found.had_memory += time.monotonic() - found.admitted_at
        self.memory_shares.left(found)
        self._count()
        return found

    def admit(self) -> None:
        """Admit waiting sessions in turn, until memory is too short for the next one, now or by forecast.

        Throttled sessions are skipped while they wait and preempted first while they run; running sessions of a tenant
        above its share are preempted too. A new text that cannot finish before its deadline is refused.
        """
        while (entry := self.memory_shares.next(a for a in self._waiting if not self.throttled(a))) is not None:
            if error := self._too_late(entry):
                self.remove(entry.session)
                entry.responses.send(error)
                continue
            if not (self._may_fit(entry) and self._admit(entry)):
                break
        self._count()

    def got_tokens(self, results: Sequence[tuple[RunningSession, VerifyResult]]) -> None:
        """Charge the tokens of a step to its sessions' tenants."""
        for entry, result in results:
            self.memory_shares.got_tokens(entry, len(result.tokens))
        if results:
            active = {entry.tenant: entry.weight for entry in self.all if not self.throttled(entry)}
            self.memory_shares.stepped(active | {entry.tenant: entry.weight for entry, _ in results})

    def throttled(self, entry: RunningSession, ahead: int = 0) -> bool:
        """True if the session, with `ahead` more tokens, is too far ahead of its reader. A `consumed` message, which
        may change this, wakes the loop."""
        return entry.session.unread + ahead > self._max_unread_tokens

    def consists_of(self, entries: Sequence[RunningSession]) -> bool:
        """Return whether the queue has no sessions besides these distinct running ones."""
        return len(entries) == len(self.running) and not self._waiting

    def reserve_texts(self, entries: Iterable[RunningSession]) -> list[RunningSession]:
        """Reserve memory for running texts up to their roots, preempting if need be. Return the sessions with
        memory."""
        reserved = [entry for entry in entries if self._reserve_text(entry)]
        return [entry for entry in reserved if entry.session.table is not None]  # not preempted for a later one

    def reserve_ahead(self, session: VerifierSession, length: int) -> bool:
        """Reserve memory for a running text of `length` tokens; return False if that would need a preemption."""
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
        """Return the error for a new session that cannot finish before its deadline, else None."""
        request = entry.session.request
        missing = request.max_tokens - len(request.generated)
        return None if entry.preemptions else self._stats.too_late(missing, request.deadline, 0)

    def _reserve_text(self, entry: RunningSession) -> bool:
        """Reserve memory for a text; return False if this preempted the text itself."""
        while entry.session.table is not None:
            try:
                entry.session.table.reserve(entry.session.tree.base)
            except PoolFullError:
                self._preempt(youngest_of_largest(self.running))
            else:
                return True
        return False

    def _may_fit(self, entry: RunningSession) -> bool:
        """Return False if memory was too short for this session less than ADMISSION_RETRY_SECONDS ago, no block has
        become available since, and a running session is ready, after whose step this is asked again."""
        before = self._refusal
        return (
            before is None
            or before.arrival != entry.arrival
            or before.available < self.pool.available
            or before.until <= time.monotonic()
            or not self.ready
        )

    def _admit(self, entry: RunningSession) -> bool:
        session = entry.session
        try:
            source, target = session.allocate(self.pool, partial(self._make_room, entry))
        except PoolFullError:
            until = time.monotonic() + ADMISSION_RETRY_SECONDS
            self._refusal = _Refusal(entry.arrival, self.pool.available, until)
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
            self.memory_shares.got_prompt(entry, session.tree.base - session.computed)
        entry.timeline.event("admitted", cached_tokens=session.computed)
        entry.computing_prompt = True
        return True

    def _make_room(self, entry: RunningSession, blocks: int) -> None:
        """Preempt sessions until there is memory for the waiting `entry`: `blocks` for its text, and the forecast
        growth of all texts. PoolFullError, without any preemption, if no choice of victims makes enough room."""
        running, room = list(self.running), self.pool.available
        throttled = [other for other in running if self.throttled(other)]
        victims, freed = list[RunningSession](), FreedBlocks()
        # Choose all victims first: preempting some without making enough room would waste their work. The forecast is
        # needed only once the text itself fits.
        while (wanted := blocks if blocks > room else max(blocks, self._growth(entry, running))) > room:
            # Throttled sessions go first: they make no progress until their readers catch up.
            victim = throttled.pop() if throttled else youngest_beyond(running, entry, entry.session.tree.base)
            if victim is None:
                raise PoolFullError(wanted * BLOCK, room * BLOCK)
            assert victim.session.table is not None
            victims.append(victim)
            running.remove(victim)
            freed.add(victim.session.table)
            room = self.pool.available + freed.count
        for victim in victims:
            self._preempt(victim)

    def _growth(self, entry: RunningSession, running: list[RunningSession]) -> int:
        """Return the forecast growth, in blocks, of the running sessions and the one being admitted. Running sessions
        that this admission would preempt are left out if that lowers the forecast."""
        growth = expected_growth([*(other.session for other in running), entry.session], self.lengths)
        if all(other.tenant == entry.tenant for other in running):  # fairness preempts between tenants only
            return growth
        counted = competing_sessions(running, entry, entry.session.tree.base)
        if len(counted) < len(running):
            growth = min(growth, expected_growth([*(other.session for other in counted), entry.session], self.lengths))
        return growth

    def _preempt(self, entry: RunningSession) -> None:
        """Preempt a session. Its text is recomputed once there is room, ahead of new sessions of its tenant."""
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

    def _take_memory(self, session: VerifierSession, *, wipe: bool = False) -> None:
        to_wipe = session.free(wipe=wipe)
        self._copy(np.full(len(to_wipe), PADDING_SLOT), to_wipe)

    def _copy(self, source: Slots, target: Slots) -> None:
        """Copy slots in parts: an engine needs memory for all slots of one copy."""
        for begin in range(0, len(source), COPIED_AT_ONCE):
            part = slice(begin, begin + COPIED_AT_ONCE)
            self._engine.copy(source[part], target[part])

    def _count(self) -> None:
        """Update the statistics of running and waiting sessions."""
        self._stats.running, self._stats.waiting = len(self.running), len(self._waiting)
        self._stats.throttled = sum(self.throttled(entry) for entry in self._waiting)
        self._stats.new_of = Counter(entry.tenant for entry in self._waiting if not entry.preemptions)
