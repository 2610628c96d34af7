"""A session's request and its speculation policy, both validated."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.decoding.block_hashes import cache_scope
from specdec.decoding.lookahead import Lookahead
from specdec.decoding.query import RequestSampler
from specdec.decoding.speculation import OWN_DRAFTERS, CandidateSource
from specdec.grammar.compiler import CompiledGrammar
from verifier_service.backend.result import Without


@dataclass(frozen=True)
class VerifierSessionRequest:
    """A validated VerifyOpen."""

    prompt: list[int]
    generated: list[int]
    sampler: RequestSampler
    end_tokens: frozenset[int]
    max_tokens: int
    top_logprobs: int | None  # alternatives to report with logprobs, besides the chosen token; None: no logprobs
    context: int  # maximum tokens of a text
    tenant: str = ""
    weight: float = 1.0  # of the tenant, relative to others
    priority: int = 0  # among sessions of the same tenant: lower goes first
    deadline: float | None = None  # of the caller, in `time.monotonic`
    checksum: int = 0  # of the VerifyOpen
    coalesce_commits: bool = False  # no client reads the text while it is generated
    rejected_candidates: bool = False  # report them
    grammar: CompiledGrammar | None = None  # of the generated text
    prompt_logprobs: int | None = None  # as `top_logprobs`, for the prompt
    scored_tokens: int = 0  # leading tokens of the prompt that need no logprobs
    cache_salt: str = ""  # separates the text from others of its tenant in caches

    @property
    def cache_scope(self) -> bytes:
        """The scope of the text in prefix caches."""
        return cache_scope(self.tenant, self.cache_salt)


@dataclass
class Policy:
    """A validated VerifyPolicy."""

    drafters: frozenset[CandidateSource]  # permitted sources of candidates
    max_candidates: int  # in one step
    patience: float  # maximum seconds, after a commit, to wait for a draft's candidates
    forced: bool = False  # speculate regardless of the controller
    lookahead: Lookahead | None = None  # size of a window in every step; None: chosen by its gain
    jacobi: bool = False  # windows have n-grams of 2 tokens
    max_depth: int = 0  # tokens verified ahead of the last committed one; 0: no limit
    overruled_logprobs: int = 0  # likeliest tokens to report where a remote draft is overruled; 0: none
    features_session: int = 0  # number of the draft session that gets features; 0: none
    why_none: Without = Without.NO_DRAFTER  # reason to report if there are no drafters

    def __post_init__(self) -> None:
        # Computed once: needed several times a step.
        self.remote = CandidateSource.REMOTE in self.drafters
        self.own = bool(self.drafters & OWN_DRAFTERS)
        self.ngram = CandidateSource.NGRAM in self.drafters
        self.windows = CandidateSource.LOOKAHEAD in self.drafters
        self.only_windows = self.drafters == {CandidateSource.LOOKAHEAD}
