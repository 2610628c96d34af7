"""A draft's proposal for one position, as sent: the tokens, and the distribution they were drawn from (REJECTION) or
that the target is contrasted with (CONTRASTIVE)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specdec.decoding.sampling import Rule

WIDTH = 128
"""Maximum tokens in a draft distribution under REJECTION: each token costs bytes on the wire, each omitted token costs
acceptance."""

MIN_PART = 0.9
"""Minimum size of a whole-vocabulary distribution, as a fraction of the vocabulary: the vocabularies of draft and
target may differ by the padding at their ends."""


BYTES_AN_ID = 2
"""Approximate bytes of a token id in a message: ids below 16,384, and gaps between ids, take one or two."""

MAX_PARTIAL_IDS = 4096
"""Maximum tokens of a partial distribution, and of a query for one. With float16 and gaps, a distribution takes at most
16 kB. If the target finds more tokens plausible, the whole vocabulary is sent."""


@dataclass(frozen=True, eq=False)
class DraftDistribution:
    """A draft's distribution over the children of a prefix, quantised.

    Both sides compute with these values, never with the draft's unrounded ones. `ids`, ascending, are the tokens of the
    values; None: the whole vocabulary, in order. A CONTRASTIVE row with ids is *partial*: it omits most of the
    log-probabilities that the draft computed.
    """

    ids: NDArray[np.int64] | None
    values: NDArray[np.float16]
    vocabulary: int | None = None  # size of the draft's vocabulary; only for a partial row
    answer: bool = False  # sent in answer to a query

    @classmethod
    def received(cls, ids: list[int], values: bytes) -> DraftDistribution:
        """Return the distribution in a message; ValueError if it is malformed."""
        if len(values) % 2 or not values:
            raise ValueError(f"values: has {len(values)} bytes, must be a non-empty float16 array (2 bytes per number)")
        numbers = np.frombuffer(values, dtype="<f2")
        if not np.isfinite(numbers).all():
            raise ValueError("values: has numbers that are not finite")
        if not ids:
            return cls(None, numbers)
        tokens = np.asarray(ids, dtype=np.int64)
        if len(tokens) != len(numbers):
            raise ValueError(f"values: has {len(numbers)} numbers for {len(tokens)} token ids")
        if (np.diff(tokens) <= 0).any():
            raise ValueError("token ids: must ascend")
        return cls(tokens, numbers)

    @property
    def size(self) -> int:
        """The number of the draft's token ids (CONTRASTIVE)."""
        return len(self.values) if self.vocabulary is None else self.vocabulary

    def values_of(self, ids: NDArray[np.int64]) -> NDArray[np.float16] | None:
        """Return the values of `ids`, which ascend and are below `size`; None if one is missing."""
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
        """Return True if the rule can use it: REJECTION needs weights of some tokens, CONTRASTIVE needs
        log-probabilities (`contrast_violation`)."""
        if rule is Rule.REJECTION:
            weights = self.ids is not None and self.vocabulary is None
            return weights and bool((self.values >= 0).all() and (self.values > 0).any())
        return rule is Rule.CONTRASTIVE and not self.contrast_violation(vocabulary)

    def contrast_violation(self, vocabulary: int) -> str:
        """Return why these values cannot be log-probabilities for a target with `vocabulary` token ids; empty if they
        can. The draft's vocabulary and the target's may differ by the padding at their ends."""
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
        """Approximate bytes in a message."""
        return self.values.nbytes + (0 if self.ids is None else BYTES_AN_ID * len(self.ids))


class DistributionSizes(NamedTuple):
    """Largest sizes of the distributions that a rule uses."""

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
"""Sizes for a rule without distributions, or for a receiver that drops them."""


class Proposal(NamedTuple):
    """A proposal: tokens drawn for a position without replacement, in the order of the draws, and the draft's
    distribution. A proposal without tokens offers no candidate."""

    tokens: tuple[int, ...]
    row: DraftDistribution
