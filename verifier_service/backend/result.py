"""The verify result: the tokens added to a session's text by its steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import NamedTuple

from specdec.decoding.logprobs import TokenLogprobs
from specdec.decoding.speculation import NO_DRAFT_PAYS, Outlook
from specdec.serving.target_logprobs import TargetLogprobs
from specdec.serving.validation import MAX_FEATURE_BYTES


class TokenSource(IntEnum):
    """The source of a committed token; numbers as in specdec.v2.TokenSource."""

    REMOTE_DRAFT = 1
    CORRECTION = 2
    BONUS = 3
    PLAIN = 4
    NGRAM = 5
    LOOKAHEAD = 6
    LOCAL_MODEL = 7
    GRAMMAR = 8
    HEADS = 9


@dataclass(frozen=True, slots=True)
class RejectedCandidate:
    """A candidate that was verified and rejected."""

    position: int  # generated tokens before it
    depth: int  # rejected candidates above it
    token: int
    source: int  # its TokenSource if it had been accepted


class FinishReason(IntEnum):
    """The reason why a text ended; numbers as in specdec.v2.FinishReason."""

    STOP = 1
    LENGTH = 2
    CONTEXT = 3


REMOTE_DRAFT, CORRECTION, BONUS, PLAIN, NGRAM, LOOKAHEAD, LOCAL_MODEL, GRAMMAR, HEADS = TokenSource
STOP, LENGTH, CONTEXT = FinishReason


class Without(StrEnum):
    """The reason why a step of a session had no candidates; names as in specdec.v2.SpeculationDecisions."""

    NO_DRAFTER = "no_drafter"
    """No drafter is available to the session. Only its orchestrator knows whether the request permits any."""
    OFF_BY_DEFAULT = "off_by_default"
    """The request leaves the choice to the verifier, whose default permits none."""
    NO_DRAFT_SERVICE = "no_draft_service"
    """Only draft services are permitted, and none is available."""
    HEADS_NOT_LOADED = "heads_not_loaded"
    """Only heads may propose for the session, and the verifier has none."""
    LOCAL_MODEL_NOT_LOADED = "local_model_not_loaded"
    """Only a local draft may propose for the session, and the verifier has none."""
    HEADS_FAILED = "heads_failed"
    LOCAL_MODEL_FAILED = "local_model_failed"
    HEADS_SLOWER = "heads_slower"
    """Only heads may propose for the session, and its mode excludes them: decoding was measured to be as fast without
    them."""
    LOCAL_MODEL_SLOWER = "local_model_slower"
    """Only a local draft may propose for the session, and its mode excludes it: decoding was measured to be as fast
    without it."""
    PLAIN_FASTER = "plain_faster"
    """The mode permits none of the session's drafters: decoding without them was measured to be as fast."""
    PROBED = "probed"
    """A probe of a mode excluded the session's drafters, or its candidates were left out to measure the cost of
    rows."""
    ROW_COST = "row_cost"
    """No candidate was worth its row."""
    NO_ROOM = "no_room"
    """A candidate was worth a row, but no row was left: the tenant's share or the tree slots were used up."""
    NOTHING_PROPOSED = "nothing_proposed"
    DRAFT_GAINS_NOTHING = "draft_gains_nothing"
    """The remote draft has gained the session almost no tokens. It is tried again later."""
    PROMPTS_FIRST = "prompts_first"
    """The session's draft pauses while prompts take the CPU cores."""
    PROMPT = "prompt"
    """The step also computed the end of the session's prompt."""


class Mode(StrEnum):
    """The candidates verified by a step."""

    OFF = "off"
    """None: one token a step."""
    NGRAM = "ngram"
    """Candidates found by the verifier without a model: by n-gram lookup, by lookahead windows, or forced by a
    grammar."""
    LOCAL_DRAFT = "local_draft"
    """The candidates of NGRAM, and of a draft model in the verifier's process."""
    HEADS = "heads"
    """The candidates of NGRAM, and of the target's heads."""
    REMOTE_DRAFT = "remote_draft"
    """The candidates of NGRAM, and of draft services."""


class Decision(NamedTuple):
    """A session's mode in one step and, if the step had no candidates for the session, the reason."""

    mode: str  # of adaptive speculation, or "forced"
    without: Without | None = None  # None: it had candidates
    row: float = 0.0  # with ROW_COST: extra seconds of the step with one more row
    break_even: float = 0.0  # with ROW_COST: tokens that this row must bring to pay
    best: float = 0.0  # with ROW_COST: tokens expected of the best candidate


FORCED = "forced"
"""Reported in place of a mode for sessions not governed by one."""

MODES = (*map(str, Mode), FORCED)


@dataclass(slots=True)
class DecisionSums:
    """Sums over decisions. All keys exist from the start, so that any thread can read the sums."""

    modes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(MODES, 0))  # steps
    without: dict[str, int] = field(default_factory=lambda: dict.fromkeys(map(str, Without), 0))  # steps, by reason
    row: float = 0.0  # seconds; `row`, `break_even` and `best` are summed over steps with ROW_COST
    break_even: float = 0.0
    best: float = 0.0

    def add(self, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            self.modes[decision.mode] += 1
            if decision.without is not None:
                self.without[decision.without] += 1
                self.row += decision.row
                self.break_even += decision.break_even
                self.best += decision.best


@dataclass(slots=True)
class VerifyResult:
    """The tokens added to a session by one step or by consecutive ones, and their sources."""

    base: int  # committed tokens before them
    offered: int  # candidates verified
    tokens: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    overruled: list[TargetLogprobs] = field(default_factory=list)  # if the policy asks for them; in order of position
    accepted: int = 0
    rejected: list[RejectedCandidate] = field(default_factory=list)  # if requested; in preorder within a step
    finish: int = 0  # FinishReason; 0: continues
    steps: int = 1
    undrafted: int = 0  # tokens of steps that lacked the expected candidates of a remote draft
    checksum: int = 0  # as in specdec.v2.Commit
    decisions: list[Decision] = field(default_factory=list)  # one per step; none if the loop does not speculate

    def join(self, later: VerifyResult) -> None:
        """Append the result of the following steps."""
        self.offered += later.offered
        self.tokens += later.tokens
        self.sources += later.sources
        self.logprobs += later.logprobs
        self.overruled += later.overruled
        self.accepted += later.accepted
        self.rejected += later.rejected
        self.finish = later.finish
        self.steps += later.steps
        self.undrafted += later.undrafted
        self.checksum = later.checksum
        self.decisions += later.decisions


MAX_SCORES_A_MESSAGE = 64
"""Maximum prompt tokens with log-probabilities in one message: an orchestrator takes about 5 ms to process them."""


class PromptScores(NamedTuple):
    """The log-probabilities of consecutive tokens of a session's prompt."""

    first: int  # position of the first token
    logprobs: list[TokenLogprobs]

    def parts(self) -> Iterator[PromptScores]:
        """Yield the scores in parts, one per message."""
        for start in range(0, len(self.logprobs), MAX_SCORES_A_MESSAGE):
            yield PromptScores(self.first + start, self.logprobs[start : start + MAX_SCORES_A_MESSAGE])


class FeatureRows(NamedTuple):
    """Fused features at consecutive positions of a text, as they are sent."""

    first: int  # position of the first row
    rows: Sequence[bytes]
    session: int  # number of the draft session that gets them, as in `Policy`

    def parts(self) -> Iterator[FeatureRows]:
        """Yield the rows in parts, one per message."""
        count = max(1, MAX_FEATURE_BYTES // len(self.rows[0]))
        for start in range(0, len(self.rows), count):
            yield FeatureRows(self.first + start, self.rows[start : start + count], self.session)


class StepSeconds(NamedTuple):
    """Durations of a step."""

    forward: float = 0.0
    step: float = 0.0
    waited: float = 0.0  # step delay, for candidates


@dataclass(frozen=True)
class CommitDetails:
    """Fields of a session's commit that are not in the verify result. Durations are in seconds."""

    forward: float  # of the step it is sent after, as are the next two; 0 outside of any step
    step: float
    waited: float  # step delay, for candidates
    queued: float  # wait for memory since the session's last commit
    cached: int = 0  # on the first commit: tokens found in the KV cache
    preemptions: int = 0  # of the session so far
    outlook: Outlook = NO_DRAFT_PAYS
    drafted_sessions: int = 0  # of the pod, with a draft
    round_trip: float = 0.0  # to the session's draft and back; 0: unknown
    rates: Mapping[str, float] | None = None  # tokens a second by mode, if changed since the last commit
