"""One version of a draft's model: its state, its statistics, and the drafter that runs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from draft_service.language_model import LanguageModelDrafter
from draft_service.version_loading import LoadedVersion
from draft_service.version_trial import Outcome


class State(Enum):
    """The state of a version, as in the contract."""

    WAITING = "waiting"
    LOADING = "loading"
    CANARY = "canary"
    SERVING = "serving"
    RETIRED = "retired"
    ENDED = "ended"
    REFUSED = "refused"
    WORSE = "worse"
    SLOW = "slow"
    FAILED = "failed"
    UNDECIDED = "undecided"
    REMOVED = "removed"
    FORGOTTEN = "forgotten"


LIVE = frozenset({State.CANARY, State.SERVING, State.RETIRED})
"""States of versions in memory."""

OVER = frozenset(State) - LIVE - {State.WAITING, State.LOADING}

OUTCOMES = (Outcome.PROMOTED.value, *(state.value for state in State if state in OVER - {State.ENDED}))
"""Outcomes of versions: promoted, or a final state except ENDED. All counters start at 0: Prometheus misses the first
increase of a counter that starts at 1."""

ROLLED_BACK: Mapping[Outcome, State] = {
    Outcome.WORSE: State.WORSE,
    Outcome.SLOW: State.SLOW,
    Outcome.UNDECIDED: State.UNDECIDED,
}


@dataclass(eq=False)
class Version:
    """A version of the model, with its statistics. Written by the draft loop's thread, read by any thread."""

    name: str
    state: State = State.WAITING
    reason: str = ""  # why it was refused or rolled back
    fingerprint: str = ""
    loaded: LoadedVersion | None = None  # while it is live
    sessions: int = 0
    committed: int = 0  # tokens committed in its sessions
    guessed: int = 0  # committed tokens found in the session's tree
    passes: int = 0
    busy: float = 0.0  # seconds spent in passes

    @property
    def drafter(self) -> LanguageModelDrafter:
        assert self.loaded is not None
        return self.loaded.drafter
