"""A drafter that holds several versions of its model, each with a drafter of its own.

One version *serves* new sessions. A new version starts as a *canary*: it drafts for a random share of the sessions
opened from then on, and a trial compares the two (`version_trial.py`). A better canary becomes the serving version, and
the previous one is *retired*: it keeps its sessions for some minutes, and is freed after the last one ends. If the
canary fails or is not better, its sessions move to the serving version between two passes. There is at most one canary
or retired version at a time.

Once a tenant is forgotten, versions that have learned from it are rolled back. A serving version keeps drafting until
an earlier one is loaded in its place. The last resort is the first version, which is never removed.

Moving a session to another version neither loses nor changes its text. The nodes of its tree stay, and the verifier
still judges them by the distributions that they were drawn from (REJECTION). The other version adds children only to
nodes that have none. CONTRASTIVE is not served: there the draft's distribution decides on tokens.

In a step, each version with sessions to expand runs exactly one pass. During a trial these passes share the limits of
one, so that the comparison is fair.
"""

from __future__ import annotations

import queue
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import structlog

from draft_service.drafter import Drafter, ExpansionError
from draft_service.forgotten import Forgotten
from draft_service.session import DrafterSession, RootMove
from draft_service.version import LIVE, OUTCOMES, OVER, ROLLED_BACK, State, Version
from draft_service.version_loading import LoadedVersion
from draft_service.version_trial import Outcome, TrialLimits, VersionTrial
from specdec.decoding.sampling import Rule
from specdec.engine.kv.slots import PoolFullError
from specdec.engine.model_file import in_one_line

log = structlog.get_logger()

MAX_KNOWN = 96
"""Maximum versions with statistics, more than a folder may have."""


MAX_PROMOTED = 8
"""Maximum promoted versions that may serve again, the serving one included; beyond it, the earliest are dropped."""

RETIRED_SECONDS = 600.0
"""Seconds after which the remaining sessions of a retired version move to the serving one."""

HAS_LEARNED = "it has learned from the texts of a tenant that was forgotten"


def _stop_checks(version: Version) -> None:
    """Stop the checks of a version that now serves: its errors are handled like any draft's."""
    if version.loaded is not None and version.loaded.watched is not None:
        version.loaded.watched.checks = False


class VersionedDrafter(Drafter):
    """The drafter of several versions. Any thread may read its attributes and properties, and call `version_of`; all
    other methods are for the draft loop's thread."""

    def __init__(
        self,
        name: str,
        loaded: LoadedVersion,
        limits: TrialLimits,
        forgotten: Forgotten | None = None,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """Serve a first version; `draw` returns numbers in [0, 1) that decide which sessions a canary gets.
        `forgotten`: versions that have learned from these tenants are refused; None: no tenants."""
        self.rules = loaded.drafter.rules - {Rule.CONTRASTIVE}
        self.outcomes = Counter(dict.fromkeys(OUTCOMES, 0))
        """Ended trials and refused versions, by outcome."""
        self.dropped: queue.SimpleQueue[LoadedVersion] = queue.SimpleQueue()
        """Models to free in a thread other than the loop's, since freeing takes as long as a pass."""
        self.interrupted: queue.SimpleQueue[str] = queue.SimpleQueue()
        """Versions to be tried again: the serving version was withdrawn during their trial, or before it began."""
        self.first = name
        """The version that the service began with."""
        self.forgotten = forgotten or Forgotten()
        self._promoted: list[str] = []  # names of promoted versions, the latest last
        self._withdrawn = False  # the serving version drafts only until an earlier version is loaded
        self._limits, self._draw = limits, draw
        self._serving = Version(name, State.SERVING, fingerprint=loaded.fingerprint, loaded=loaded)
        self._canary: Version | None = None
        self._trial: VersionTrial[DrafterSession] = VersionTrial(limits)
        """The canary's trial. An ended trial is replaced immediately, since it keeps its sessions in memory."""
        self._retired: Version | None = None
        self._retired_at = 0.0  # monotonic time
        self._known = {name: self._serving}
        self._of: dict[DrafterSession, Version] = {}
        self._waiting_for_memory: dict[DrafterSession, None] = {}
        """Moved sessions that wait for memory at the serving version."""

    # --- read by any thread ---------------------------------------------------------------------------

    @property
    def slots(self) -> int:
        return sum(loaded.drafter.slots for loaded in self._in_memory())

    @property
    def slots_used(self) -> int:
        return sum(loaded.drafter.slots_used for loaded in self._in_memory())

    def _in_memory(self) -> list[LoadedVersion]:
        versions = (self._serving, self._canary, self._retired)
        found = [version.loaded for version in versions if version is not None]
        return [loaded for loaded in found if loaded is not None]

    def version_of(self, session: DrafterSession) -> Version | None:
        """Return the version that drafts for a session; None while the session has no memory."""
        return self._of.get(session)

    @property
    def serving(self) -> Version:
        return self._serving

    @property
    def known(self) -> list[Version]:
        """The versions with statistics: the first version, then the others in the order of discovery."""
        return list(self._known.values())

    @property
    def is_free(self) -> bool:
        """True if a canary may begin: there is no canary or retired version, and the serving one is not withdrawn."""
        return self._canary is None and self._retired is None and not self._withdrawn

    @property
    def earlier(self) -> list[str]:
        """Earlier versions that may replace a withdrawn serving version: the latest first, the first version last.
        Empty if the serving version is not withdrawn, and while a canary is still in memory."""
        waits = not self._withdrawn or self._canary is not None
        return [] if waits else [*reversed(self._promoted[:-1]), self.first]

    @property
    def expected(self) -> Callable[[int], float] | None:
        """A function from the number of nodes of a pass to its seconds in the serving version; None if unknown."""
        loaded = self._serving.loaded
        return None if loaded is None or loaded.times is None else loaded.times.of

    # --- versions come and go -------------------------------------------------------------------------

    def note(self, name: str, state: State, reason: str = "") -> None:
        """Record the state of a version that is not live; no-op for a live one."""
        known = self._known.get(name)
        if known is not None and known.state in LIVE:
            return
        if known is None or known.state in OVER:
            self._known.pop(name, None)  # found again: it becomes the latest
            known = self._known[name] = Version(name)
            self._forget_some()
            self._promoted = [other for other in self._promoted if other != name]  # its files have changed
        known.state, known.reason = state, reason
        if state in (State.REFUSED, State.FORGOTTEN):
            self.outcomes[state.value] += 1
            log.warning("version_refused", version=name, why=reason)

    def _forget_some(self) -> None:
        """Drop ended versions, oldest first, while more than MAX_KNOWN versions are known."""
        for name in [name for name, version in self._known.items() if version.state in OVER]:
            if len(self._known) <= MAX_KNOWN:
                break
            del self._known[name]

    def begin(self, name: str, loaded: LoadedVersion) -> None:
        version = self._known.get(name)
        if version is None or version.state in LIVE or not self.is_free:  # removed meanwhile, or not to be tried now
            self.dropped.put(loaded)
            if self._withdrawn:
                self.interrupted.put(name)
            return
        if self.forgotten.concerns(loaded.learned_from):
            self.dropped.put(loaded)
            self.note(name, State.FORGOTTEN, HAS_LEARNED)
            return
        version.loaded, version.fingerprint, version.state = loaded, loaded.fingerprint, State.CANARY
        self._canary, self._trial = version, VersionTrial(self._limits)
        log.info("version_on_trial", version=name, share=self._limits.share, tokens=self._limits.tokens)

    def remove(self, name: str) -> None:
        """Follow the removal of a version's directory: a canary's trial ends, a version that waits or loads is dropped,
        others stay."""
        version = self._known.get(name)
        if version is None:
            return
        if version is self._canary:
            self._roll_back(version, State.REMOVED, "its directory was removed")
        elif version.state in (State.WAITING, State.LOADING):
            del self._known[name]

    # --- forgotten tenants ----------------------------------------------------------------------------

    def forget(self) -> list[str]:
        """Roll back the versions that have learned from forgotten tenants; return their names. If the serving version
        is among them, a retired version still in memory replaces it immediately; without one, it keeps drafting until
        `go_back` replaces it."""
        found = [version for version in (self._canary, self._retired) if version is not None and self._is_out(version)]
        for version in found:
            self._roll_back(version, State.FORGOTTEN, HAS_LEARNED)
        serving = self._serving
        if serving.name == self.first or self._withdrawn or not self._is_out(serving):
            return [version.name for version in found]
        self._withdrawn = True
        serving.reason = f"{HAS_LEARNED}; it drafts until an earlier version is loaded"
        log.warning("version_withdrawn", version=serving.name, why=HAS_LEARNED)
        if self._canary is not None:
            self._interrupt(self._canary)
        if self._retired is not None:
            self._go_back_to(self._retired)
        return [*(version.name for version in found), serving.name]

    def _is_out(self, version: Version) -> bool:
        return version.loaded is not None and self.forgotten.concerns(version.loaded.learned_from)

    def _interrupt(self, canary: Version) -> None:
        """End a trial without a verdict; the trial begins again once another version serves."""
        self._take_out(canary)
        canary.state = State.WAITING
        self.interrupted.put(canary.name)
        log.info("version_interrupted", version=canary.name)

    def go_back(self, name: str, loaded: LoadedVersion) -> None:
        """Serve an earlier version again, in place of the withdrawn one."""
        if not self._withdrawn or (name != self.first and self.forgotten.concerns(loaded.learned_from)):
            self.dropped.put(loaded)
            return
        version = self._known.setdefault(name, Version(name))
        version.loaded, version.fingerprint = loaded, loaded.fingerprint
        self._go_back_to(version)

    def _go_back_to(self, version: Version) -> None:
        """Serve this version, which is in memory, in place of the withdrawn one, and take over its sessions."""
        withdrawn, self._serving, self._retired = self._serving, version, None
        self._promoted = [name for name in self._promoted if name not in (withdrawn.name, version.name)]
        if version.name != self.first:
            self._promoted.append(version.name)
        _stop_checks(version)
        version.state, version.reason = State.SERVING, ""
        log.warning("version_back", version=version.name, instead_of=withdrawn.name)
        self._roll_back(withdrawn, State.FORGOTTEN, HAS_LEARNED)
        self._withdrawn = False  # last: now that the withdrawn version is dropped, another one may be loaded

    # --- trials ---------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """End the trial if there is a verdict."""
        canary, verdict = self._canary, self._trial.verdict
        if canary is None or verdict is None:
            return
        if verdict is Outcome.PROMOTED:
            self._promote(canary)
        else:
            self._roll_back(canary, ROLLED_BACK[verdict], self._trial.reason)

    def _promote(self, version: Version) -> None:
        before = self._serving
        _stop_checks(version)
        version.state, before.state = State.SERVING, State.RETIRED
        self._serving, self._retired, self._canary = version, before, None
        self._retired_at = time.monotonic()
        self._promoted = [*self._promoted, version.name][-MAX_PROMOTED:]
        self.outcomes[Outcome.PROMOTED.value] += 1
        log.info("version_promoted", version=version.name, before=before.name, why=self._trial.reason)
        self._trial = VersionTrial(self._limits)
        self._end_retired()

    def _roll_back(self, version: Version, state: State, reason: str) -> None:
        moved = self._take_out(version)
        version.state, version.reason = state, reason
        self.outcomes[state.value] += 1
        log.warning("version_rolled_back", version=version.name, outcome=state.value, why=reason, sessions=moved)

    def _take_out(self, version: Version) -> int:
        """Move a version's sessions to the serving one, and free its memory; return the number of sessions."""
        for session in [session for session, own in self._of.items() if own is version]:
            version.drafter.close(session)
            del self._of[session]
            session.abandon_frontier()
            self._waiting_for_memory[session] = None
        moved, version.sessions = version.sessions, 0
        self._drop(version)  # before other threads see that there is room for another one
        if version is self._canary:
            self._canary, self._trial = None, VersionTrial(self._limits)
        elif version is self._retired:
            self._retired = None
        self._open_waiting()
        return moved

    def end_overdue(self) -> None:
        """Move the sessions of a retired version to the serving one after RETIRED_SECONDS: a session without a reader
        may last for ever, and no other version can be tried meanwhile."""
        version = self._retired
        if version is not None and time.monotonic() - self._retired_at > RETIRED_SECONDS:
            moved = self._take_out(version)
            version.state = State.ENDED
            log.info("version_ended", version=version.name, moved=moved)

    def _end_retired(self) -> None:
        """Free the retired version if it has no sessions left."""
        version = self._retired
        if version is not None and not version.sessions:
            self._drop(version)
            version.state, self._retired = State.ENDED, None
            log.info("version_ended", version=version.name)

    def _drop(self, version: Version) -> None:
        if version.loaded is not None:
            self.dropped.put(version.loaded)
            version.loaded = None

    def _open_waiting(self) -> None:
        """Open moved sessions at the serving version, as far as it has memory. The others follow commits, but get no
        candidates until memory is free."""
        for session in list(self._waiting_for_memory):
            try:
                self._open(session, self._serving)
            except PoolFullError:
                continue
            del self._waiting_for_memory[session]

    # --- sessions -------------------------------------------------------------------------------------

    def open(self, session: DrafterSession) -> None:
        canary = self._canary
        if canary is None:
            self._open(session, self._serving)
            return
        is_new = self._draw() < self._limits.share
        try:
            self._open(session, canary if is_new else self._serving)
        except PoolFullError:
            if not is_new:
                raise
            self._open(session, self._serving)  # not part of the trial: it was drawn for the canary
        else:
            self._trial.opened(session, is_new=is_new)

    def _open(self, session: DrafterSession, version: Version) -> None:
        version.drafter.open(session)
        self._of[session] = version
        version.sessions += 1

    def commit(self, session: DrafterSession, move: RootMove) -> None:
        version = self._of.get(session)
        if version is None:
            return
        version.drafter.commit(session, move)
        version.committed += len(move.tokens)
        version.guessed += len(move.followed)
        if self._canary is not None:
            paused = session.policy.paused
            self._trial.committed(session, len(move.tokens), len(move.followed), paused=paused)
            self._settle()

    def close(self, session: DrafterSession) -> None:
        version = self._of.pop(session, None)
        self._waiting_for_memory.pop(session, None)
        if version is None:
            return
        version.drafter.close(session)
        version.sessions -= 1
        if self._canary is not None:
            self._trial.closed(session)
            self._settle()
        self._end_retired()
        if self._waiting_for_memory:
            self._open_waiting()

    # --- passes ---------------------------------------------------------------------------------------

    def best_logprob(self, session: DrafterSession) -> float:
        version = self._of.get(session)
        return float("-inf") if version is None else version.drafter.best_logprob(session)

    def expand(self, sessions: Sequence[DrafterSession]) -> Mapping[DrafterSession, Exception]:
        of_versions: dict[Version, list[DrafterSession]] = {}
        for session in sessions:
            of_versions.setdefault(self._of[session], []).append(session)
        failed: Mapping[DrafterSession, Exception] = {}
        broken: ExpansionError | None = None
        for version, own in of_versions.items():
            begin = time.monotonic()
            try:
                lost = version.drafter.expand(own, sessions if self._canary is not None else ())
            except Exception as error:  # the serving version's error goes to the loop, after the others' passes
                if version is self._serving:
                    broken = error if isinstance(error, ExpansionError) else ExpansionError(own, error)
                else:
                    self._fail(version, error.cause if isinstance(error, ExpansionError) else error)
                continue
            if version is self._serving:
                failed = lost
            elif lost:  # if a session is at fault instead, it will fail at the serving version, too
                self._fail(version, next(iter(lost.values())))
                continue
            if version.drafter.rows_expanded:  # otherwise its share of this step was less than a row
                self._passed(version, time.monotonic() - begin)
        if broken is not None:
            raise broken
        return failed

    def _fail(self, version: Version, error: Exception) -> None:
        """Roll back the canary or the retired version after a failed pass."""
        log.error("version_failed", version=version.name, exc_info=error)
        self._roll_back(version, State.FAILED, f"a pass failed: {in_one_line(error)}")

    def _passed(self, version: Version, seconds: float) -> None:
        """Count a pass, and compare a canary's time with the serving version's. Passes over more than `widest` rows
        read prompts, and are not compared."""
        version.passes += 1
        version.busy += seconds
        loaded, serving = version.loaded, self._serving.loaded
        if version is not self._canary or loaded is None or loaded.watched is None:
            return
        if serving is not None and serving.times is not None and 0 < loaded.watched.rows <= serving.widest:
            self._trial.passed(seconds, serving.times.of(loaded.watched.rows))
            self._settle()

    def recover(self) -> bool:
        return self._serving.drafter.recover()
