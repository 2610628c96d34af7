"""A valid request and its samples, made from a message by `parsing.py`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property

import numpy as np

from orchestrator.requests.reasoning import Reasoning, reasoning_message
from specdec.decoding.block_hashes import HASHED_TOKENS, block_hashes, cache_scope
from specdec.decoding.sampling import NUMBERS, Rule, Sampling
from specdec.decoding.speculation import SpeculationOptions
from specdec.grammar.json_schema.text_check import TextCheck
from specdec.v2 import generation_pb2, model_pb2


class PromptTokens(list[int]):
    """The tokens of a prompt. Digest and block hashes are computed once for all samples of the request."""

    @cached_property
    def digest(self) -> str:
        """The SHA-256, in hex, over tokens of four bytes each (little-endian)."""
        return hashlib.sha256(np.asarray(self, "<u4").tobytes()).hexdigest()

    def block_hashes(self, scope: bytes) -> list[int]:
        """Return the hashes of the prompt's full blocks in a cache scope."""
        if scope not in self._hashes:
            self._hashes[scope] = block_hashes(self, scope)
        return self._hashes[scope]

    @cached_property
    def _hashes(self) -> dict[bytes, list[int]]:
        return {}


@dataclass(frozen=True)
class Sample:
    """One of the n completions of a request."""

    index: int
    prompt: PromptTokens
    generated: list[int]
    sampling: Sampling
    sampling_message: model_pb2.Sampling  # `sampling` without its seed, the same message for all samples
    max_tokens: int
    min_tokens: int
    end_tokens: frozenset[int]
    stop: tuple[str, ...]
    top_logprobs: int | None  # number of top tokens with logprobs; None: no logprobs, not even of the chosen token
    speculation: SpeculationOptions
    tenant: str
    rule: Rule
    contrast: model_pb2.Contrast
    typicality: model_pb2.Typicality
    weight: float = 1.0  # the tenant's, relative to other tenants at a verifier
    priority: int = 0  # within the tenant: lower goes first
    model_fingerprint: str = ""  # of the model that the text was started with; empty: any model
    coalesce_commits: bool = False  # the client reads the text only when it is complete
    rejected_candidates: bool = False  # return rejected candidates
    grammar: model_pb2.Grammar | None = None  # constrains the text; None: unconstrained
    grammar_field: str = ""  # field of the request that sets the grammar
    shown_tokens: frozenset[int] = frozenset()  # special tokens that the text shows
    show_special: bool = False  # all special tokens are shown
    include_stop: bool = False  # the text includes the stop string or end token
    reasoning: Reasoning | None = None  # at the start of the text, if any
    time: datetime | None = None  # seen by the chat template
    prompt_logprobs: int | None = None  # as `top_logprobs`, for the prompt; of the first sample only
    schema_check: TextCheck | None = None  # checks the part of the answer's schema that no grammar enforces
    cache_salt: str = ""  # separates the text from others of its tenant in caches
    learn: bool = False  # draft services may keep the text to learn from it
    tool_format: str = ""  # name of the format of calls in the text; empty without tools

    @property
    def cache_scope(self) -> bytes:
        return cache_scope(self.tenant, self.cache_salt)

    @property
    def draft_rule(self) -> Rule:
        """The rule by which drafts guess: COUPLED under TYPICAL, else the sample's own."""
        return Rule.COUPLED if self.rule is Rule.TYPICAL else self.rule

    @property
    def needs_draft(self) -> bool:
        """True if no token can be chosen without a draft."""
        return self.rule is Rule.CONTRASTIVE

    @property
    def forces_drafting(self) -> bool:
        """True if a draft is used whether or not it pays."""
        return self.needs_draft or self.speculation.forced


class CommittedText:
    """The committed tokens of one sample. Only `Verification` appends to them. Sessions are opened with them, so trees
    and caches of draft and verifier can be rebuilt at any time."""

    def __init__(self, sample: Sample) -> None:
        self._prompt, self._scope = sample.prompt, sample.cache_scope
        self._generated = list(sample.generated)
        self._to_score = 0 if sample.prompt_logprobs is None else len(sample.prompt)
        self.scored = 0  # leading prompt tokens whose log-probabilities have arrived; the first token has none

    @property
    def generated(self) -> Sequence[int]:
        """The tokens after the prompt."""
        return self._generated

    @property
    def block_hashes(self) -> list[int]:
        """The hashes of the full blocks of prompt and generated tokens."""
        known = self._prompt.block_hashes(self._scope)
        return block_hashes([*self._prompt[HASHED_TOKENS * len(known) :], *self._generated], self._scope, known)

    @property
    def unscored(self) -> int:
        """The number of prompt tokens whose log-probabilities are requested and have not arrived."""
        return self._to_score - self.scored

    @property
    def begun(self) -> bool:
        """True once part of the text comes from a verifier, which binds the text to that verifier's model."""
        return bool(self._generated or self.scored)

    def add(self, tokens: Sequence[int]) -> None:
        self._generated += tokens


@dataclass(frozen=True)
class Request:
    """A valid request: its seed, and its samples."""

    seed: int
    samples: list[Sample]

    @property
    def prompt_tokens(self) -> int:
        return len(self.samples[0].prompt)

    @property
    def given_tokens(self) -> int:
        """Tokens for a verifier to prefill before it chooses the first new one."""
        return self.prompt_tokens + len(self.samples[0].generated)


def resolved(sample: Sample, model: str) -> generation_pb2.ResolvedRequest:
    """Return the resolved request of a sample. `model` names its revision; empty if the revision has no name."""
    message = generation_pb2.ResolvedRequest(
        model=model,
        sampling=generation_pb2.SamplingParameters(**{name: getattr(sample.sampling, name) for name in NUMBERS}),
        prompt_tokens=len(sample.prompt),
        max_tokens=sample.max_tokens,
        end_tokens=sorted(sample.end_tokens),
        prompt_digest=sample.prompt.digest,
        reasoning=reasoning_message(sample.reasoning),
        tool_format=sample.tool_format,
    )
    if sample.time is not None:
        message.time.FromDatetime(sample.time)
    return message
