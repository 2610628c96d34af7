"""Draft logits: the logits of one forward pass of a draft, from which candidates are made.

Candidates come from the largest logits of a row, its *shortlist*. Only the implementing class knows where the logits
are. The implementation in this file keeps them in host memory. An implementation on a device sends the host the
shortlists of a pass, and whole rows only on request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from specdec.decoding.processing import Logits

MAX_DRAFT_LOGITS = 256
"""Number of a row's largest logits that are searched for candidates."""

COLUMNS, MIN_HEIGHT = 16 * MAX_DRAFT_LOGITS, 4
"""Number of columns in which a long row is searched, and the minimum number of logits per column at which this pays."""


class Shortlists(NamedTuple):
    """The k largest logits of n rows with their ids: largest first, lower ids first among equals. Where equal logits
    compete for the last places, any of them may be listed. NaN counts as infinity."""

    values: NDArray[np.float32]  # [n, k]
    ids: NDArray[np.int64]  # [n, k]

    def of(self, rows: Sequence[int]) -> Shortlists:
        """Return the shortlists of these rows."""
        chosen = np.asarray(rows, dtype=np.int64)
        return Shortlists(self.values[chosen], self.ids[chosen])


class DraftLogits(Protocol):
    """The draft logits: n rows over one vocabulary."""

    def shortlists(self, rows: Sequence[int]) -> Shortlists:
        """Return the MAX_DRAFT_LOGITS largest logits of these rows, or all of a smaller vocabulary."""

    def whole(self, rows: Sequence[int]) -> Sequence[Logits]:
        """Return these rows, float32 [V] each, read-only."""


class HostDraftLogits:
    """Draft logits in host memory."""

    def __init__(self, logits: Logits) -> None:
        """`logits` are float32 [n, V]."""
        self._logits = logits

    def shortlists(self, rows: Sequence[int]) -> Shortlists:
        distinct = sorted(set(rows))
        found = shortlists(self.whole(distinct))
        if list(rows) == distinct:
            return found
        places = np.searchsorted(distinct, rows)
        return Shortlists(found.values[places], found.ids[places])

    def whole(self, rows: Sequence[int]) -> Sequence[Logits]:
        return [self._logits[row] for row in rows]


class MappedDraftLogits:
    """Draft logits of a draft that knows only some tokens of a vocabulary."""

    def __init__(self, logits: DraftLogits, ids: NDArray[np.int64], vocabulary: int) -> None:
        """`ids`: token ids of the columns of `logits`, below `vocabulary`. Other tokens have logits of -inf."""
        self._logits = logits
        self._ids = ids
        self._vocabulary = vocabulary

    def shortlists(self, rows: Sequence[int]) -> Shortlists:
        found = self._logits.shortlists(rows)
        return Shortlists(found.values, self._ids[found.ids])

    def whole(self, rows: Sequence[int]) -> Sequence[Logits]:
        return [self._spread(row) for row in self._logits.whole(rows)]

    def _spread(self, row: Logits) -> Logits:
        spread = np.full(self._vocabulary, -np.inf, dtype=np.float32)
        spread[self._ids] = row
        return spread


def shortlists(rows: Sequence[Logits]) -> Shortlists:
    """Return the shortlists of at least one row of logits, float32 [V] each."""
    count = min(len(rows[0]), MAX_DRAFT_LOGITS)
    values, ids = np.empty((len(rows), count), dtype=np.float32), np.empty((len(rows), count), dtype=np.int64)
    for at, row in enumerate(rows):
        ids[at] = own = _largest(row)
        values[at] = row[own]
    # Read as integers, the bits of floats ascend for positive numbers and descend for negative ones; the xor makes them
    # ascend for all. Sorting int64 keys (float bits above, id below) takes a fraction of the time of a stable float
    # sort. fmin turns NaN into infinity, and adding 0.0 turns -0.0 into 0.0.
    bits = (np.fmin(values, np.float32(np.inf)) + np.float32(0.0)).view(np.int32)
    ascending = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ids = np.sort(ids - (ascending.astype(np.int64) << 32), axis=1) & 0xFFFFFFFF
    for at, row in enumerate(rows):
        values[at] = row[ids[at]]
    return Shortlists(values, ids)


def _largest(row: Logits) -> NDArray[np.int64]:
    """Return the ids of a row's MAX_DRAFT_LOGITS largest logits, in any order.

    Long rows are laid out in columns. The MAX_DRAFT_LOGITS-th largest column maximum is a lower bound of the
    MAX_DRAFT_LOGITS-th largest logit. Few logits reach this bound, and only these are partitioned. Column maxima take a
    third of the time of partitioning the row.
    """
    if len(row) <= MAX_DRAFT_LOGITS:
        return np.arange(len(row))
    if len(row) < MIN_HEIGHT * COLUMNS:
        least = np.partition(row, -MAX_DRAFT_LOGITS)[-MAX_DRAFT_LOGITS]
    else:
        height = len(row) // COLUMNS
        maxima = row[: height * COLUMNS].reshape(height, COLUMNS).max(axis=0)
        least = np.partition(maxima, -MAX_DRAFT_LOGITS)[-MAX_DRAFT_LOGITS]
    (ids,) = (~(row < least)).nonzero()  # NaN is not less
    if len(ids) > MAX_DRAFT_LOGITS:
        ids = ids[np.argpartition(row[ids], -MAX_DRAFT_LOGITS)[-MAX_DRAFT_LOGITS:]]
    return np.asarray(ids)
