"""A request's sampling parameters, and their limits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum

GREEDY_BELOW = 1e-4
"""Temperature below which sampling is greedy: dividing by it would only amplify rounding."""


class Rule(Enum):
    """An acceptance rule: how candidates become tokens."""

    COUPLED = "coupled"
    """Draft and target choose with the same noise; a candidate is accepted iff it is the target's choice."""
    REJECTION = "rejection"
    """A sampled candidate is accepted with probability min(1, p/q), or replaced by a draw from the residual."""
    CONTRASTIVE = "contrastive"
    """The target takes the token with the largest log p - log q among those it finds plausible."""
    TYPICAL = "typical"
    """A candidate is accepted if the target finds it typical; otherwise the target chooses, as under COUPLED."""


@dataclass(frozen=True)
class Contrast:
    """Parameters of the CONTRASTIVE rule (Li et al. 2023, "Contrastive decoding: open-ended text generation as
    optimization")."""

    alpha: float = 0.1
    """A token is plausible if its probability is at least this fraction of the largest probability. In (0, 1]."""
    amateur_temperature: float = 1.0
    """Divides the draft's logits. Above 0."""


DEFAULT_CONTRAST = Contrast()


@dataclass(frozen=True)
class Typicality:
    """Parameters of the TYPICAL rule (Cai et al. 2024, "Medusa", section 3.3.1): a candidate is accepted if its
    probability is above min(epsilon, delta * exp(-entropy)). The defaults are Medusa's."""

    epsilon: float = 0.09
    """In (0, 1]."""
    delta: float = 0.3
    """Above 0."""


DEFAULT_TYPICALITY = Typicality()


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters, in order of application. The defaults disable all of them."""

    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    banned_tokens: frozenset[int] = frozenset()
    banned_sequences: frozenset[tuple[int, ...]] = frozenset()
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    seed: int = 0

    def within(self, vocabulary: int) -> Sampling:
        """Return these parameters without biases and bans of token ids outside a vocabulary. A banned sequence with
        such an id can never occur, so it is dropped."""
        return replace(
            self,
            logit_bias={token: bias for token, bias in self.logit_bias.items() if token < vocabulary},
            banned_tokens=frozenset(token for token in self.banned_tokens if token < vocabulary),
            banned_sequences=frozenset(tokens for tokens in self.banned_sequences if max(tokens) < vocabulary),
        )

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def penalises(self) -> bool:
        """True if the choice depends on the tokens already in the text."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0


PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")

NUMBERS = tuple(one.name for one in fields(Sampling) if isinstance(one.default, int | float) and one.name != "seed")
"""Names of the parameters with a single number, except the seed. Requests and messages have fields of the same names,
which `orchestrator/requests/sampling.py`, `sample.py` and `specdec/serving/messages.py` convert by this list."""

MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
"""Limits of the repetition penalty: beyond them, logits become so large or small that the penalty alone decides."""


def sampling_violations(sampling: Sampling, vocabulary: int, barred: frozenset[int]) -> list[tuple[str, str]]:
    """Return (field, problem) for every field whose value is outside its range, at most one per field. `barred`: end
    tokens that `min_tokens` excludes initially; they and the banned tokens must not cover the vocabulary."""
    prefix = "sampling."
    found: list[tuple[str, str]] = []

    def check(field: str, value: float, good: bool, limit: str) -> bool:
        if not good:
            found.append((prefix + field, f"is {value:g}, must be {limit}"))
        return good

    s = sampling
    check("temperature", s.temperature, 0 <= s.temperature < math.inf, "a finite number of at least 0")
    check("top_p", s.top_p, 0 < s.top_p <= 1, "in (0, 1]")
    check("min_p", s.min_p, 0 <= s.min_p <= 1, "in [0, 1]")
    check("typical_p", s.typical_p, 0 < s.typical_p <= 1, "in (0, 1]")
    least, most = MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY
    # The field is float32 on the wire, where 0.01 is slightly less.
    within = least * (1 - 1e-6) <= s.repetition_penalty <= most
    check("repetition_penalty", s.repetition_penalty, within, f"in [{least:g}, {most:g}]")
    check("frequency_penalty", s.frequency_penalty, -2 <= s.frequency_penalty <= 2, "in [-2, 2]")
    check("presence_penalty", s.presence_penalty, -2 <= s.presence_penalty <= 2, "in [-2, 2]")
    for token, bias in s.logit_bias.items():
        known = check(f"logit_bias[{token}]", token, token < vocabulary, f"keyed by a token id below {vocabulary}")
        if not (known and check(f"logit_bias[{token}]", bias, -100 <= bias <= 100, "in [-100, 100]")):
            break
    highest = max(s.banned_tokens, default=0)
    check("banned_tokens", highest, highest < vocabulary, f"a token id below {vocabulary}")
    never = s.banned_tokens | barred
    if len(never) >= vocabulary:
        found.append((f"{prefix}banned_tokens", f"leaves none of the {vocabulary} tokens to choose"))
    elif len(never.union(tokens[-1] for tokens in s.banned_sequences)) >= vocabulary:
        problem = f"together with banned_tokens, may ban all {vocabulary} tokens where a banned sequence would end"
        found.append((f"{prefix}banned_sequences", problem))
    highest = max(map(max, s.banned_sequences), default=0)
    check("banned_sequences", highest, highest < vocabulary, f"a token id below {vocabulary}")
    return found
