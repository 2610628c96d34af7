"""The CONTRASTIVE rule (Li et al. 2023, "Contrastive decoding: open-ended text generation as optimization").

    choice = argmax of log p(v) - log q(v)  over v with p(v) >= alpha * max p        lowest id on ties

where p is the target's distribution and q the draft's (the "amateur"). Without q nothing can be chosen. log q is sent
in float16.

Only *plausible* tokens, those with p(v) >= alpha * max p, can be chosen. They are few, and nearly all of them are among
the draft's likeliest, so the draft sends a *partial distribution*: log q of its likeliest tokens (`likeliest`). A
plausible token missing from it may be the choice, since a smaller q means a better score. Such a row is `UNDECIDED`,
and the verifier asks for log q of its plausible tokens (`DraftQuery`). So the choice never depends on which tokens were
sent ahead, and never mixes the q of two drafts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specdec.decoding.processing import Logits
from specdec.decoding.proposal import MAX_PARTIAL_IDS, DraftDistribution
from specdec.decoding.query import SamplingQuery
from specdec.decoding.sampling import Contrast

UNDECIDED = -1
"""Stands for the chosen token of a row whose proposal lacks log q of a plausible token."""

MAX_LIKELIEST = 512
"""Maximum tokens of an unrequested partial distribution: about 2 kB. A draft sends these distributions for about ten
prefixes per token of the text."""


class DraftQuery(NamedTuple):
    """Asks a draft for log q after the committed text of `base` tokens: of `ids`, ascending, or (None) of all."""

    base: int
    ids: NDArray[np.int64] | None


def amateur_distribution(logits: Logits, contrast: Contrast) -> DraftDistribution:
    """Return the log-probabilities of a draft's float32 logits [V]. The largest logit must be finite."""
    z = logits.astype(np.float64) / contrast.amateur_temperature
    z -= z.max()
    log_q = z - math.log(np.exp(z).sum())
    return DraftDistribution(None, np.maximum(log_q, np.finfo(np.float16).min).astype(np.float16))


def likeliest(row: DraftDistribution, contrast: Contrast, margin: float) -> DraftDistribution:
    """Return the part of a whole row to send ahead: the tokens with q(v) >= alpha * exp(-margin) * max q, at most
    `MAX_LIKELIEST`. If these are most of the vocabulary, return the whole row.

    A larger margin leaves fewer plausible tokens out. If target and draft agreed, a margin of 0 would suffice.
    """
    log_q = row.values
    least = float(log_q.max()) + math.log(contrast.alpha) - margin
    ids = np.flatnonzero(log_q >= np.float32(least))
    if len(ids) > MAX_LIKELIEST:
        ids = np.sort(ids[np.argpartition(log_q[ids], -MAX_LIKELIEST)[-MAX_LIKELIEST:]])
    return row if _is_most(len(ids), row.size) else DraftDistribution(ids, log_q[ids], vocabulary=row.size)


def answer(row: DraftDistribution, ids: NDArray[np.int64] | None) -> DraftDistribution:
    """Return a draft's answer to a query, from the whole row at the query's prefix. Tokens outside the draft's
    vocabulary are left out; if none remain, the whole row is the answer."""
    known = answered_ids(ids, row.size)
    if known is None:
        return DraftDistribution(None, row.values, answer=True)
    return DraftDistribution(known, row.values[known], vocabulary=row.size, answer=True)


def answered_ids(ids: NDArray[np.int64] | None, vocabulary: int) -> NDArray[np.int64] | None:
    """Return the requested ids below `vocabulary`, the size of the draft's vocabulary. None: the whole vocabulary, also
    if no requested id is in it."""
    known = None if ids is None else ids[ids < vocabulary]
    return None if known is None or not len(known) else known


def answers(row: DraftDistribution, ids: NDArray[np.int64] | None) -> bool:
    """Return True if the row has log q of all `ids` in the draft's vocabulary; if `ids` is None, of the whole
    vocabulary."""
    if row.ids is None:
        return True
    return ids is not None and row.values_of(ids[ids < row.size]) is not None


def ids_to_query(
    plausible: NDArray[np.int64], before: NDArray[np.int64] | None, vocabulary: int
) -> NDArray[np.int64] | None:
    """Return the ids to query: a row's plausible ones, and any ids requested earlier for the same prefix. None, the
    whole vocabulary, if these are too many for a partial distribution.

    An engine that is not exact may find other tokens plausible when it recomputes the row. Ids requested earlier stay
    in the query, so that the next answer suffices for both computations.
    """
    ids = plausible if before is None else np.union1d(plausible, before)
    return None if len(ids) > MAX_PARTIAL_IDS or _is_most(len(ids), vocabulary) else ids


def _is_most(count: int, vocabulary: int) -> bool:
    """Return True if a partial distribution of `count` tokens saves little: a whole one costs 2 bytes per token and has
    no ids."""
    return 2 * count > vocabulary


def plausible(z: Logits, query: SamplingQuery) -> NDArray[np.int64]:
    """Return int64 [k]: the plausible tokens of processed logits [V] among the draft's tokens, ascending. ValueError
    without a proposal."""
    if query.proposal is None:
        raise ValueError(f"position {query.position}: nothing to contrast with")
    known = z[: query.proposal.row.size]  # tokens outside the draft's vocabulary have no q
    largest = float(known.max())
    if not math.isfinite(largest):  # no token of the draft is allowed
        return np.empty(0, dtype=np.int64)
    return np.flatnonzero(known >= largest + math.log(query.sampler.contrast.alpha))


def decide(z: Logits, queries: Sequence[SamplingQuery]) -> NDArray[np.int64]:
    """Return int64 [n]: the tokens chosen from processed logits [n, V], or `UNDECIDED`. ValueError if a query has no
    proposal."""
    return np.array([_decide(row, query) for row, query in zip(z, queries, strict=True)], dtype=np.int64)


def _decide(z: Logits, query: SamplingQuery) -> int:
    ids = plausible(z, query)
    if not len(ids):
        return int(z.argmax())
    assert query.proposal is not None  # `plausible` needs it
    log_q = query.proposal.row.values_of(ids)
    if log_q is None:
        return UNDECIDED
    return int(ids[(z[ids].astype(np.float64) - log_q.astype(np.float64)).argmax()])
