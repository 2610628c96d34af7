"""Validated openings and policies of sessions, as the code works with them."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.decoding.lookahead import Lookahead
from specdec.decoding.query import RequestSampler
from specdec.decoding.speculation import OWN_DRAFTERS, Drafter
from specdec.grammar.compiler import CompiledGrammar


@dataclass(frozen=True)
class SessionRequest:
    """A validated VerifyOpen."""

    prompt: list[int]
    generated: list[int]
    sampler: RequestSampler
    end_tokens: frozenset[int]
    max_tokens: int
    top_logprobs: int | None  # most probable tokens to give logprobs of, besides the chosen one's; None: no logprobs
    context: int  # most tokens of a text
    tenant: str = ""
    weight: float = 1.0  # share of the tenant, relative to others
    priority: int = 0  # among sessions of the same tenant: lower goes first
    deadline: float | None = None  # of the caller, in monotonic time
    checksum: int = 0  # of the VerifyOpen
    coalesce_commits: bool = False  # nobody waits for single tokens
    grammar: CompiledGrammar | None = None  # what the generated text must look like


@dataclass
class Policy:
    """A validated VerifyPolicy."""

    drafters: frozenset[Drafter]  # who may propose candidates
    max_candidates: int  # in one step
    patience: float  # seconds after a commit that a step may wait for a draft's candidates
    forced: bool = False  # speculate whether or not it pays
    lookahead: Lookahead | None = None  # size of a window in every step; None: one that pays

    def __post_init__(self) -> None:
        # Computed once: every step needs them several times.
        self.remote = Drafter.REMOTE in self.drafters
        self.own = bool(self.drafters & OWN_DRAFTERS)
        self.ngram = Drafter.NGRAM in self.drafters
        self.windows = Drafter.LOOKAHEAD in self.drafters
        self.local_model = Drafter.LOCAL_MODEL in self.drafters
