"""The CONTRASTIVE rule (Li et al. 2023, "Contrastive decoding: open-ended text generation as optimization").

    choice = argmax of log p(v) - log q(v)  over v with p(v) >= alpha * max p        lowest id on ties

where p is the target's distribution and q that of the draft, the "amateur". The choice is a function of both models:
without q nothing can be chosen. q is sent as log-probabilities of the whole vocabulary in float16, since the rule's
scores depend most on tokens with a small q.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specdec.decoding.processing import Logits
from specdec.decoding.proposal import DraftDistribution
from specdec.decoding.query import SamplingQuery
from specdec.decoding.sampling import Contrast


def amateur_distribution(logits: Logits, contrast: Contrast) -> DraftDistribution:
    """Return the log-probabilities of a draft's float32 logits [V], the largest of which must be finite."""
    z = logits.astype(np.float64) / contrast.amateur_temperature
    z -= z.max()
    log_q = z - math.log(np.exp(z).sum())
    return DraftDistribution(None, np.maximum(log_q, np.finfo(np.float16).min).astype(np.float16))


def decide(z: Logits, queries: Sequence[SamplingQuery]) -> NDArray[np.int64]:
    """Return int64 [n]: the tokens chosen from processed logits [n, V]. ValueError if a query has no proposal."""
    return np.array([_decide(row, query) for row, query in zip(z, queries, strict=True)], dtype=np.int64)


def _decide(z: Logits, query: SamplingQuery) -> int:
    if query.proposal is None:
        raise ValueError(f"position {query.position}: nothing to contrast with")
    log_q = query.proposal.row.values
    known = z[: len(log_q)]  # tokens outside the draft's vocabulary have no q
    if not np.isfinite(known.max()):
        return int(z.argmax())
    plausible = np.flatnonzero(known >= float(known.max()) + math.log(query.sampler.contrast.alpha))
    scores = known[plausible].astype(np.float64) - log_q[plausible].astype(np.float64)
    return int(plausible[scores.argmax()])
