"""Validated openings and policies of draft sessions, as the code works with them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from specdec.decoding.query import RequestSampler
from specdec.decoding.sampling import Rule
from specdec.grammar.compiler import CompiledGrammar

MIN_PROBABILITY = 0.002
"""Least path probability at which a node is expanded."""

SEND_FACTOR = 3.0
"""Least path probability at which a node is sent, in multiples of the least at which one is expanded.

Most of what is expanded early lies where the text will not go, so it is sent only once the text has come this near.
That halves the bytes, at no cost in tokens a second (`python -m bench simulate`)."""


@dataclass(frozen=True)
class ExpansionPolicy:
    """A validated DraftPolicy."""

    max_nodes: int = 256  # most nodes offered to the verifier, and most expanded
    max_depth: int = 64
    max_branches: int = 5
    min_path_probability: float = MIN_PROBABILITY
    extend_interval: float = 0.0  # least seconds between two messages
    round_trip: float = 0.0  # seconds from verifier to draft and back; 0: unknown
    paused: bool = False  # nothing is to be done but to keep up, more or less

    @cached_property
    def min_logprob(self) -> float:
        """`min_path_probability` as a log-probability."""
        if self.paused:
            return 0.0
        return math.log(self.min_path_probability) if self.min_path_probability > 0 else -math.inf

    @cached_property
    def min_sent_logprob(self) -> float:
        """Least path logprob at which a node is sent."""
        return self.min_logprob + math.log(SEND_FACTOR)


@dataclass(frozen=True)
class SessionRequest:
    """A validated DraftOpen."""

    prompt: list[int]
    generated: list[int]
    sampler: RequestSampler
    end_tokens: frozenset[int]
    max_tokens: int
    context: int  # most tokens of a text
    grammar: CompiledGrammar | None = None  # what the generated text must look like
    tenant: str = ""
    weight: float = 1.0  # share of the tenant, relative to others

    @property
    def distributions_required(self) -> bool:
        """True if the verifier can choose no token without this draft's distributions."""
        return self.sampler.rule is Rule.CONTRASTIVE
