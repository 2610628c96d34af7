"""A synthetic language without a model: the next token is a function of the text's hash.

Every text has a kind, drawn from its hash: easier or harder to continue. The kind sets the draft's probability that the
target's token has a given rank, and the actual rank is drawn from the same probabilities. So the draft is calibrated,
no text reveals more than its kind, and the acceptance can be chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from specdec.decoding.candidates import AGREEMENT_SCALE
from specdec.decoding.noise import mix

Hashes = NDArray[np.uint64]  # [n], of texts

EASY, HARD = 0.95, 0.4
"""Acceptance of the draft's best token, by kind of text."""

DECAY = 0.5
"""Ratio of consecutive ranks' probabilities, from the third rank on."""

CERTAIN = 10.0
"""Logit of the target's next token; all others are 0."""


def hash_of(text: Sequence[int]) -> int:
    """Return the hash of a text; 0 for the empty text."""
    value = 0
    for token in text:
        value = following(value, token)
    return value


def following(text: int, token: int) -> int:
    """Return the hash of a text extended by a token."""
    return mix(text ^ mix(token))


@dataclass(frozen=True)
class Language:
    """A language. `acceptance`: how often the draft's best token is right, over all texts; between HARD and EASY."""

    acceptance: float = 0.75
    vocabulary: int = 64

    def __post_init__(self) -> None:
        if not HARD <= self.acceptance <= EASY:
            raise ValueError(f"acceptance must be in [{HARD}, {EASY}], is {self.acceptance}")

    @cached_property
    def kinds(self) -> NDArray[np.float64]:
        """Probabilities [2, V] of each rank in an easy text and in a hard one."""
        tail = DECAY ** np.arange(self.vocabulary - 1)
        tail /= tail.sum()
        return np.stack([np.concatenate([[best], (1 - best) * tail]) for best in (EASY, HARD)])

    @cached_property
    def shares(self) -> NDArray[np.float64]:
        """Shares [2] of easy and of hard texts."""
        easy = (self.acceptance - HARD) / (EASY - HARD)
        return np.asarray([easy, 1.0 - easy])

    def kind(self, texts: Hashes) -> NDArray[np.intp]:
        return np.asarray(_uniform(texts, 0) >= self.shares[0], dtype=np.intp)

    def token(self, texts: Hashes, rank: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the draft's candidate of that rank."""
        first = texts % np.uint64(self.vocabulary)
        return (first.astype(np.int64) + rank) % self.vocabulary

    def next(self, texts: Hashes) -> NDArray[np.int64]:
        """Return [n]: the next token of each text."""
        below = np.cumsum(self.kinds, axis=1)[self.kind(texts)]
        rank = (below < _uniform(texts, 1)[:, None]).sum(axis=1)
        return self.token(texts, np.minimum(rank, self.vocabulary - 1))

    def continuation(self, text: Sequence[int], count: int) -> list[int]:
        """Return `count` tokens of the target's continuation of a text."""
        value, tokens = hash_of(text), []
        for _ in range(count):
            (token,) = self.next(np.asarray([value], dtype=np.uint64)).tolist()
            tokens.append(token)
            value = following(value, token)
        return tokens

    def target_logits(self, texts: Hashes) -> NDArray[np.float32]:
        logits = np.zeros((len(texts), self.vocabulary), dtype=np.float32)
        logits[np.arange(len(texts)), self.next(texts)] = CERTAIN
        return logits

    def draft_logits(self, texts: Hashes) -> NDArray[np.float32]:
        """Return logits from which `draft_candidates` gives this language's probabilities at temperature 0."""
        logits = np.empty((len(texts), self.vocabulary), dtype=np.float32)
        ranked = AGREEMENT_SCALE * np.log(self.kinds[self.kind(texts)])
        tokens = self.token(texts[:, None], np.arange(self.vocabulary)[None, :])
        np.put_along_axis(logits, tokens, ranked.astype(np.float32), axis=1)
        return logits


def _uniform(texts: Hashes, purpose: int) -> NDArray[np.float64]:
    """Return uniform numbers in [0, 1), independent for each text and purpose (`token` uses the hash's low bits)."""
    words = (texts >> np.uint64(8 + 26 * purpose)) & np.uint64((1 << 26) - 1)
    return np.asarray(words / float(1 << 26))
