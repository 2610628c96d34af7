"""What a draft says of one position: a token, and the distribution that it was drawn from or that the target is to be
contrasted with, in the form in which it travels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specdec.decoding.sampling import Rule


@dataclass(frozen=True, eq=False)
class DraftDistribution:
    """A draft's distribution over the children of a prefix, quantised.

    Both sides work with these very values: what the draft had before it rounded them is nobody's business.
    `ids`, ascending, are the tokens that the values belong to; None: all of the vocabulary, in order.
    """

    ids: NDArray[np.int64] | None
    values: NDArray[np.float16]

    @classmethod
    def received(cls, ids: list[int], values: bytes) -> DraftDistribution | None:
        """From a message; None if it makes no sense."""
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

    def fits(self, rule: Rule, vocabulary: int) -> bool:
        """Whether it is what the rule works with: weights of some tokens, or log-probabilities of all (but for the
        padding at the end of a vocabulary)."""
        if rule is Rule.REJECTION:
            return self.ids is not None and bool((self.values >= 0).all() and (self.values > 0).any())
        return rule is Rule.CONTRASTIVE and self.ids is None and len(self.values) > 0.9 * vocabulary

    def can_draw(self, token: int) -> bool:
        """Whether a token has any weight; of a row with ids."""
        return self.ids is not None and bool((self.values[self.ids == token] > 0).any())

    def sent(self) -> tuple[list[int], bytes]:
        """(ids, values) of a message."""
        return [] if self.ids is None else self.ids.tolist(), self.values.astype("<f2").tobytes()


class Proposal(NamedTuple):
    """`token` is None where nothing is offered."""

    token: int | None
    row: DraftDistribution
