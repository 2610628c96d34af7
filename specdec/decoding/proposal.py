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


BYTES_AN_ID = 2
"""Bytes of a token id in a message, about: ids below 16,384, and gaps between ids, take one or two."""

MAX_PARTIAL_IDS = 4096
"""Most tokens of a partial distribution, and of a query for one. With float16 and gaps it is at most 16 kB; where the
target finds more tokens plausible, the whole vocabulary is sent."""


@dataclass(frozen=True, eq=False)
class DraftDistribution:
    """A draft's distribution over the children of a prefix, quantised.

    Both sides compute with these values, never with the draft's unrounded ones. `ids`, ascending, are the tokens of the
    values; None: the whole vocabulary, in order. A CONTRASTIVE row with ids is *partial*: the draft has a
    log-probability of every token, and has left most of them out.
    """

    ids: NDArray[np.int64] | None
    values: NDArray[np.float16]
    vocabulary: int | None = None  # of a partial distribution: the number of the draft's token ids
    answer: bool = False  # a partial or whole row that was asked for, with just the tokens of the query

    @classmethod
    def received(cls, ids: list[int], values: bytes) -> DraftDistribution:
        """Return the distribution in a message; ValueError if it is malformed."""
        if len(values) % 2 or not values:
            raise ValueError(f"values: has {len(values)} bytes, must have 2 for each of at least one number")
        numbers = np.frombuffer(values, dtype="<f2")
        if not np.isfinite(numbers).all():
            raise ValueError("values: has numbers that are not finite")
        if not ids:
            return cls(None, numbers)
        tokens = np.asarray(ids, dtype=np.int64)
        if len(tokens) != len(numbers):
            raise ValueError(f"values: has {len(numbers)} numbers for {len(tokens)} token ids")
        if (np.diff(tokens) <= 0).any():
            raise ValueError("token ids: do not ascend")
        return cls(tokens, numbers)

    @property
    def size(self) -> int:
        """The number of the draft's token ids (CONTRASTIVE)."""
        return len(self.values) if self.vocabulary is None else self.vocabulary

    def values_of(self, ids: NDArray[np.int64]) -> NDArray[np.float16] | None:
        """Return the values of these tokens, ascending and below `size`; None if one of them was left out."""
        if self.ids is None:
            return self.values[ids]
        places = np.searchsorted(self.ids, ids)
        if len(places) and places[-1] == len(self.ids):
            return None
        return self.values[places] if (self.ids[places] == ids).all() else None

    @classmethod
    def certain(cls, token: int) -> DraftDistribution:
        """Return the distribution with all probability on one token."""
        return cls(np.asarray([token], dtype=np.int64), np.ones(1, dtype=np.float16))

    def fits(self, rule: Rule, vocabulary: int) -> bool:
        """Return True if the rule can use it: REJECTION needs weights of some tokens, CONTRASTIVE log-probabilities
        (`contrast_violation`)."""
        if rule is Rule.REJECTION:
            weights = self.ids is not None and self.vocabulary is None
            return weights and bool((self.values >= 0).all() and (self.values > 0).any())
        return rule is Rule.CONTRASTIVE and not self.contrast_violation(vocabulary)

    def contrast_violation(self, vocabulary: int) -> str:
        """Return what is wrong with it as log-probabilities for a target with `vocabulary` token ids; empty if nothing
        is. The vocabularies may differ by the padding at their ends."""
        if not MIN_PART * vocabulary < self.size < vocabulary / MIN_PART:
            return f"it is over a vocabulary of {self.size} tokens, the target's has {vocabulary}"
        if self.ids is not None and self.vocabulary is None:
            return "it has `ids`, which are for REJECTION"
        if self.ids is not None and self.ids[-1] >= self.size:
            return f"it has token {self.ids[-1]}, its vocabulary has {self.size} tokens"
        largest = self.values.max()
        return f"it has a log-probability of {largest:g}, must be at most 0" if largest > 0 else ""

    def can_draw(self, token: int) -> bool:
        """Return True if the token has a weight above 0; False without ids."""
        return self.ids is not None and bool((self.values[self.ids == token] > 0).any())

    @property
    def nbytes(self) -> int:
        """Its size in a message in bytes, about."""
        return self.values.nbytes + (0 if self.ids is None else BYTES_AN_ID * len(self.ids))


class DistributionSizes(NamedTuple):
    """Largest sizes of a distribution that a rule can use."""

    ids: int = 0
    gaps: int = 0
    values: int = 0

    @classmethod
    def of(cls, rule: Rule, vocabulary: int) -> DistributionSizes:
        if rule is Rule.REJECTION:
            return cls(ids=WIDTH, values=WIDTH)
        if rule is Rule.CONTRASTIVE:
            return cls(gaps=MAX_PARTIAL_IDS, values=int(vocabulary / MIN_PART))
        return NO_DISTRIBUTION


NO_DISTRIBUTION = DistributionSizes()
"""Sizes where a rule has no distributions, or nobody reads them."""


class Proposal(NamedTuple):
    """A proposal: the tokens drawn for a position without replacement, in the order of the draws, and the draft
    distribution. Without tokens nothing is offered."""

    tokens: tuple[int, ...]
    row: DraftDistribution
