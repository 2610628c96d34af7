"""A draft's proposal for one position, as sent: tokens, and the distribution they were drawn from (REJECTION) or the
target is contrasted with (CONTRASTIVE)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specdec.decoding.sampling import Rule

WIDTH = 128
"""Most tokens in a draft distribution under REJECTION: each costs bytes on the wire; omitted tokens cost acceptance."""

MIN_PART = 0.9
"""Least size of a whole-vocabulary distribution, as a fraction of the vocabulary: the vocabularies of draft and target
may differ by the padding at their ends."""


@dataclass(frozen=True, eq=False)
class DraftDistribution:
    """A draft's distribution over the children of a prefix, quantised.

    Both sides compute with these values, never with the draft's unrounded ones. `ids`, ascending, are the tokens of the
    values; None: the whole vocabulary, in order.
    """

    ids: NDArray[np.int64] | None
    values: NDArray[np.float16]

    @classmethod
    def received(cls, ids: list[int], values: bytes) -> DraftDistribution | None:
        """Return the distribution in a message; None if it is invalid."""
        if len(values) % 2 or not values:
            return None
        numbers = np.frombuffer(values, dtype="<f2")
        if not np.isfinite(numbers).all():
            return None
        if not ids:
            return cls(None, numbers)
        tokens = np.asarray(ids, dtype=np.int64)
        if len(tokens) != len(numbers) or (np.diff(tokens) <= 0).any():
            return None
        return cls(tokens, numbers)

    @classmethod
    def certain(cls, token: int) -> DraftDistribution:
        """Return the distribution with all probability on one token."""
        return cls(np.asarray([token], dtype=np.int64), np.ones(1, dtype=np.float16))

    def fits(self, rule: Rule, vocabulary: int) -> bool:
        """Return True if the rule can use it: REJECTION needs weights of some tokens, CONTRASTIVE log-probabilities of
        the whole vocabulary, up to the padding at its end."""
        if rule is Rule.REJECTION:
            return self.ids is not None and bool((self.values >= 0).all() and (self.values > 0).any())
        return (
            rule is Rule.CONTRASTIVE
            and self.ids is None
            and MIN_PART * vocabulary < len(self.values) < vocabulary / MIN_PART
        )

    def can_draw(self, token: int) -> bool:
        """Return True if the token has a weight above 0; False without ids."""
        return self.ids is not None and bool((self.values[self.ids == token] > 0).any())

    def sent(self) -> tuple[list[int], bytes]:
        """Return (ids, values) for a message."""
        return [] if self.ids is None else self.ids.tolist(), self.values.astype("<f2").tobytes()


def distribution_sizes(rule: Rule, vocabulary: int) -> tuple[int, int]:
    """Return the most ids and the most values of a distribution the rule can use."""
    if rule is Rule.REJECTION:
        return WIDTH, WIDTH
    return (0, int(vocabulary / MIN_PART)) if rule is Rule.CONTRASTIVE else (0, 0)


class Proposal(NamedTuple):
    """A proposal: the tokens drawn for a position without replacement, in the order of the draws, and the draft
    distribution. Without tokens nothing is offered."""

    tokens: tuple[int, ...]
    row: DraftDistribution
