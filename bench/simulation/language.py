"""A language without a model: what follows a text is a function of the text's hash.

Every text is of a kind, drawn from its hash, easier or harder to continue. The draft says of each rank how likely the
target's token stands there: this much its kind decides. Where it does stand is drawn from the same probabilities. So
the draft is honest, no text tells it more than it says, and how often it is right is a number to choose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from specdec.decoding.choice import AGREEMENT_SCALE
from specdec.decoding.noise import mix

Hashes = NDArray[np.uint64]  # [n], of texts

EASY, HARD = 0.95, 0.4
"""How often the draft's best token is right, by kind."""

DECAY = 0.5
"""Of two ranks behind the first, the next is so much less likely."""

CERTAIN = 10.0
"""The logit of what follows; others are 0."""


def hash_of(text: Sequence[int]) -> int:
    """The empty text's is 0."""
    value = 0
    for token in text:
        value = following(value, token)
    return value


def following(text: int, token: int) -> int:
    """The hash of a text and one token more."""
    return mix(text ^ mix(token))


@dataclass(frozen=True)
class Language:
    """`acceptance`: how often the draft's best token is right, over all texts; between HARD and EASY."""

    acceptance: float = 0.75
    vocabulary: int = 64

    def __post_init__(self) -> None:
        if not HARD <= self.acceptance <= EASY:
            raise ValueError(f"acceptance must be in [{HARD}, {EASY}], is {self.acceptance}")

    @cached_property
    def kinds(self) -> NDArray[np.float64]:
        """[2, V]: the probability of each rank in an easy text and in a hard one."""
        tail = DECAY ** np.arange(self.vocabulary - 1)
        tail /= tail.sum()
        return np.stack([np.concatenate([[best], (1 - best) * tail]) for best in (EASY, HARD)])

    @cached_property
    def shares(self) -> NDArray[np.float64]:
        """[2]: of texts, by kind."""
        easy = (self.acceptance - HARD) / (EASY - HARD)
        return np.asarray([easy, 1.0 - easy])

    def kind(self, texts: Hashes) -> NDArray[np.intp]:
        return np.asarray(_uniform(texts, 0) >= self.shares[0], dtype=np.intp)

    def token(self, texts: Hashes, rank: NDArray[np.int64]) -> NDArray[np.int64]:
        """The draft's guess of that rank."""
        first = texts % np.uint64(self.vocabulary)
        return (first.astype(np.int64) + rank) % self.vocabulary

    def next(self, texts: Hashes) -> NDArray[np.int64]:
        """[n]: the token that follows."""
        below = np.cumsum(self.kinds, axis=1)[self.kind(texts)]
        rank = (below < _uniform(texts, 1)[:, None]).sum(axis=1)
        return self.token(texts, np.minimum(rank, self.vocabulary - 1))

    def continuation(self, text: Sequence[int], count: int) -> list[int]:
        """What the target says, one token after the other."""
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
        """Those from which the choice rule reads the probabilities of this language, at temperature 0."""
        logits = np.empty((len(texts), self.vocabulary), dtype=np.float32)
        ranked = AGREEMENT_SCALE * np.log(self.kinds[self.kind(texts)])
        tokens = self.token(texts[:, None], np.arange(self.vocabulary)[None, :])
        np.put_along_axis(logits, tokens, ranked.astype(np.float32), axis=1)
        return logits


def _uniform(texts: Hashes, purpose: int) -> NDArray[np.float64]:
    """In [0, 1), independent for each text and purpose. The hash's low bits name the first token."""
    words = (texts >> np.uint64(8 + 26 * purpose)) & np.uint64((1 << 26) - 1)
    return np.asarray(words / float(1 << 26))
