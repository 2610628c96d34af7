"""The verify result: the tokens added to a session's text by its steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from specdec.decoding.logprobs import TokenLogprobs
from specdec.decoding.speculation import NO_DRAFT_PAYS, Outlook


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


@dataclass(frozen=True, slots=True)
class RejectedCandidate:
    """A candidate that was verified and rejected."""

    position: int  # generated tokens before it
    depth: int  # rejected candidates above it
    token: int
    source: int  # TokenSource, had it been accepted


class FinishReason(IntEnum):
    """The reason why a text ended; numbers as in specdec.v2.FinishReason."""

    STOP = 1
    LENGTH = 2
    CONTEXT = 3


REMOTE_DRAFT, CORRECTION, BONUS, PLAIN, NGRAM, LOOKAHEAD, LOCAL_MODEL, GRAMMAR = TokenSource
STOP, LENGTH, CONTEXT = FinishReason


@dataclass(slots=True)
class VerifyResult:
    """The tokens added to a session by one step or by consecutive ones, and their sources."""

    base: int  # committed tokens before them
    offered: int  # candidates verified
    tokens: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    accepted: int = 0
    rejected: list[RejectedCandidate] = field(default_factory=list)  # if requested; in preorder within a step
    finish: int = 0  # FinishReason; 0: continues
    steps: int = 1
    undrafted: int = 0  # tokens of steps that wanted a remote draft's candidates and had none
    checksum: int = 0  # as in specdec.v2.Commit

    def join(self, later: VerifyResult) -> None:
        """Append the result of the following steps."""
        self.offered += later.offered
        self.tokens += later.tokens
        self.sources += later.sources
        self.logprobs += later.logprobs
        self.accepted += later.accepted
        self.rejected += later.rejected
        self.finish = later.finish
        self.steps += later.steps
        self.undrafted += later.undrafted
        self.checksum = later.checksum


MAX_SCORES_A_MESSAGE = 64
"""Tokens of a prompt with log-probabilities in one message: an orchestrator spends some 5 ms on them."""


class PromptScores(NamedTuple):
    """The log-probabilities of consecutive tokens of a session's prompt."""

    first: int  # position of the first of them
    logprobs: list[TokenLogprobs]

    def parts(self) -> Iterator[PromptScores]:
        """Yield them in parts for one message each."""
        for start in range(0, len(self.logprobs), MAX_SCORES_A_MESSAGE):
            yield PromptScores(self.first + start, self.logprobs[start : start + MAX_SCORES_A_MESSAGE])


@dataclass(frozen=True)
class StepTimes:
    """Times of one step in seconds, and the rest of a session's commit besides its verify result."""

    forward: float
    step: float
    waited: float  # step delay, for candidates
    queued: float  # for memory, since its last commit
    cached: int = 0  # on the first commit: tokens found in the KV cache
    preemptions: int = 0  # of the session so far
    outlook: Outlook = NO_DRAFT_PAYS
    drafted: int = 0  # sessions of the pod with a draft
    round_trip: float = 0.0  # to the session's draft and back; 0: unknown
