"""A valid request, and the samples that it asks for: what `request.py` makes of a message."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from orchestrator.reasoning import Reasoning
from specdec.decoding.sampling import Rule, Sampling
from specdec.decoding.speculation import Speculation
from specdec.v2 import model_pb2


@dataclass(frozen=True)
class Sample:
    """One of the n completions of a request."""

    index: int
    prompt: list[int]
    generated: list[int]
    sampling: Sampling
    max_tokens: int
    min_tokens: int
    end_tokens: frozenset[int]
    stop: tuple[str, ...]
    top_logprobs: int | None  # most probable tokens whose logprobs are wanted; None: not even the chosen one's
    speculation: Speculation
    tenant: str
    rule: Rule
    contrast: model_pb2.Contrast
    weight: float = 1.0  # of the tenant, among those that want a verifier at the same time
    priority: int = 0  # among those of the tenant: lower goes first
    revision: str = ""  # of the model that the text was begun with; empty: any
    coalesce_commits: bool = False  # nobody reads while the text is made
    grammar: model_pb2.Grammar | None = None  # what the text must look like
    shown_tokens: frozenset[int] = frozenset()  # special tokens that the text shows all the same
    reasoning: Reasoning | None = None  # that the answer begins with, or may begin with
    time: datetime | None = None  # that the chat template saw

    @property
    def needs_draft(self) -> bool:
        """True if no token can be chosen without a draft."""
        return self.rule is Rule.CONTRASTIVE

    @property
    def insists_on_draft(self) -> bool:
        """True if every step after the prompt should have candidates of a draft."""
        return self.speculation.remote and (self.forces_drafting or self.rule is Rule.REJECTION)

    @property
    def forces_drafting(self) -> bool:
        """True if a draft is at work whether or not it pays."""
        return self.needs_draft or self.speculation.forced


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
        """Tokens that a verifier must read before it chooses the first one."""
        return self.prompt_tokens + len(self.samples[0].generated)
