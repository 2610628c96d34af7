"""Validated openings and policies of draft sessions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from specdec.decoding.query import RequestSampler
from specdec.decoding.sampling import Rule
from specdec.decoding.speculation import Scorer
from specdec.grammar.compiler import CompiledGrammar

MIN_PROBABILITY = 0.002
"""Minimum path probability of a node to be expanded."""

MIN_CONTRASTED_PROBABILITY = 0.02
"""The same minimum under CONTRASTIVE. Each node is then sent with log q of many tokens, and most tokens of a step are
the target's own, since the rule prefers tokens that the draft does not expect. On the demo pair, with target passes of
30 ms and draft passes of 3 ms, a step yields 1.78 tokens, and the draft sends 12 distributions per token; with a
minimum of 0.002, the numbers are 1.82 and 45."""

MAX_KEPT_BYTES = 16 << 20
"""Maximum bytes of the rows that a CONTRASTIVE session keeps to answer queries: whole rows of all its nodes. Over a
vocabulary of 151,936 tokens that is 55 rows."""

SEND_FACTOR = 3.0
"""Minimum path probability of a node to be sent, in multiples of the minimum for expansion. A smaller multiple applies
if that minimum exceeds 1/9 (`min_sent_logprob`).

Most early expansions lie off the text's eventual path, so a node is sent only once the text has come this near to it.
That halves the bytes sent, at no cost in tokens a second (`python -m bench simulate`).
"""


@dataclass(frozen=True)
class ExpansionPolicy:
    """A validated DraftPolicy."""

    max_nodes: int = 256  # limit on nodes offered to the verifier, and on nodes expanded
    max_depth: int = 64  # maximum depth of a node that a step verifies, below the last committed token
    max_branches: int = 5
    min_path_probability: float = MIN_PROBABILITY
    scorer: Scorer = Scorer.CALIBRATED
    expansion: tuple[int, ...] = ()  # children of a node by its depth, whatever their probability; (): by probability
    extend_interval: float = 0.0  # minimum seconds between messages
    round_trip: float = 0.0  # seconds from verifier to draft and back; 0: unknown
    paused: bool = False  # expand nothing; follow commits, with a bounded lag
    partial_distributions: bool = False  # CONTRASTIVE: send log q of the likeliest tokens only

    @cached_property
    def min_logprob(self) -> float:
        """`min_path_probability` as a log-probability. With fixed widths there is no minimum (-inf); while paused it is
        0, the highest."""
        if self.paused:
            return 0.0
        if self.expansion:
            return -math.inf
        return math.log(self.min_path_probability) if self.min_path_probability > 0 else -math.inf

    @property
    def deepest(self) -> int:
        """Maximum depth of a node to expand, below the last committed token. A tree grown by probability continues
        below the nodes of the next step, since that step's commit (at most `max_depth` + 1 tokens) may be under way. A
        tree of fixed widths is for one step."""
        return len(self.expansion) - 1 if self.expansion else 2 * self.max_depth

    def width(self, depth: int) -> int:
        """Return the maximum children of a node expanded at this depth below the last committed token."""
        return self.expansion[min(depth, len(self.expansion) - 1)] if self.expansion else self.max_branches

    @cached_property
    def min_sent_logprob(self) -> float:
        """The minimum path logprob of a node to be sent. For a `min_path_probability` p above 1/9 it is log sqrt(p),
        since SEND_FACTOR p would reach 1 at p = 1/3. While paused it is inf: only the likeliest next token is sent."""
        if self.paused:
            return math.inf
        return min(self.min_logprob + math.log(SEND_FACTOR), 0.5 * self.min_logprob)


@dataclass(frozen=True)
class DrafterSessionRequest:
    """A validated DraftOpen."""

    prompt: list[int]
    generated: list[int]
    sampler: RequestSampler
    end_tokens: frozenset[int]
    max_tokens: int
    context: int  # maximum tokens of a text
    grammar: CompiledGrammar | None = None  # of the generated text
    tenant: str = ""
    weight: float = 1.0  # of the tenant, relative to others
    own_prompt: Sequence[int] = ()  # the prompt in the draft's tokens, if its tokenizer is not the target's
    learn: bool = False  # the text may be kept for learning
    age: float = 0.0  # seconds since its request arrived
    target_vocabulary: int = 0  # number of the target's token ids: its log-probabilities may name ids the draft lacks

    @property
    def distributions_required(self) -> bool:
        """True if the verifier cannot choose any token without this draft's distributions."""
        return self.sampler.rule is Rule.CONTRASTIVE
