"""A request's sampling parameters, already validated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

GREEDY_BELOW = 1e-4
"""Temperature below which sampling is greedy: the division would only amplify rounding."""


class Rule(Enum):
    """An acceptance rule: how candidates become tokens."""

    COUPLED = "coupled"
    """Draft and target choose with the same noise; a candidate is accepted iff it is the target's choice."""
    REJECTION = "rejection"
    """A sampled candidate is accepted with probability min(1, p/q), or replaced by a draw from the residual."""
    CONTRASTIVE = "contrastive"
    """The target takes the token with the largest log p - log q among those it finds plausible."""


@dataclass(frozen=True)
class Contrast:
    """Parameters of the CONTRASTIVE rule (Li et al. 2023, "Contrastive decoding: open-ended text generation as
    optimization")."""

    alpha: float = 0.1
    """A token is plausible if its probability is at least this times that of the most probable one. In (0, 1]."""
    amateur_temperature: float = 1.0
    """Divides the draft's logits. Above 0."""


DEFAULT_CONTRAST = Contrast()


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters, in order of application. The defaults leave everything off."""

    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    banned_tokens: frozenset[int] = frozenset()
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def within(self, vocabulary: int) -> Sampling:
        """Return these parameters without bias and bans of token ids outside a vocabulary."""
        return replace(
            self,
            logit_bias={token: bias for token, bias in self.logit_bias.items() if token < vocabulary},
            banned_tokens=frozenset(token for token in self.banned_tokens if token < vocabulary),
        )

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def penalises(self) -> bool:
        """True if the choice depends on the tokens already in the text."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0
