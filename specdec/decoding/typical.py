"""The TYPICAL rule: typical acceptance (Cai et al. 2024, "Medusa: simple LLM inference acceleration framework with
multiple decoding heads", arXiv:2401.10774, section 3.3.1).

A candidate x is accepted if the target finds it typical, whether or not the target would choose it:

    accept x  if  p(x) > min(epsilon, delta * exp(-H(p)))          H: the entropy of p in nats

p is the distribution that the request samples from. In a tree, the longest path of accepted candidates is taken; among
equally long paths, the most probable. Below it the target chooses as under COUPLED; if its choice is a candidate too,
acceptance continues below that candidate.

This is faster than the exact rules, but changes the text, which then depends on the candidates. A candidate that cannot
be continued, such as an end token, loses to any longer path. At temperature 0 only the likeliest token is typical, and
COUPLED is used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specdec.decoding.processing import MAX_ABS_LOGIT, Logits, adjusted
from specdec.decoding.query import SamplingQuery
from specdec.decoding.rejection import Weights, target_probabilities
from specdec.decoding.sampling import Typicality
from specdec.decoding.truncation import Ids


class TypicalCandidate(NamedTuple):
    """A candidate of a tree."""

    parent: int  # index among the nodes with candidates below
    token: int
    node: int | None  # its own index among these; None: it has no candidates below


class TypicalQuery(NamedTuple):
    """A query about the candidates below a node of a tree. `rows`: indices of the logits after the nodes that have
    candidates below, this node's first; `queries`: their sampling queries. Parents come before their children."""

    rows: Sequence[int]
    queries: Sequence[SamplingQuery]
    candidates: Sequence[TypicalCandidate]


class _Path(NamedTuple):
    """A path of accepted candidates."""

    tokens: tuple[int, ...]
    logprob: float


def accepted(logits: Sequence[Logits], query: TypicalQuery) -> list[int]:
    """Return the tokens of the accepted path, perhaps none. `logits`: float32 [V] of each row. Nothing is accepted
    below a row whose logits are broken."""
    paths: dict[int, _Path] = {0: _Path((), 0.0)}  # to nodes with candidates below
    judged: dict[int, tuple[Ids, Weights, float] | None] = {}
    best = paths[0]
    for candidate in query.candidates:
        above = paths.get(candidate.parent)
        if above is None:
            continue
        if candidate.parent not in judged:
            judged[candidate.parent] = _judged(logits[candidate.parent], query.queries[candidate.parent])
        if (found := judged[candidate.parent]) is None:
            continue
        ids, p, least = found
        place = int(ids.searchsorted(candidate.token))
        if place == len(ids) or ids[place] != candidate.token or not p[place] > least:
            continue
        path = _Path((*above.tokens, candidate.token), above.logprob + math.log(p[place]))
        if (len(path.tokens), path.logprob) > (len(best.tokens), best.logprob):
            best = path
        if candidate.node is not None:
            paths[candidate.node] = path
    return list(best.tokens)


def threshold(p: Weights, typicality: Typicality) -> float:
    """Return the exclusive lower bound on the probability of a typical token of this distribution."""
    positive = p[p > 0.0]
    entropy = -float((positive * np.log(positive)).sum())
    return min(typicality.epsilon, typicality.delta * math.exp(-entropy))


def _judged(logits: Logits, query: SamplingQuery) -> tuple[Ids, Weights, float] | None:
    """Return the tokens that survive truncation, ascending, their probabilities and the threshold; None if the logits
    are broken."""
    with np.errstate(over="ignore", invalid="ignore"):
        (z,) = adjusted(logits[None], [query])
    if not abs(z.max()) < MAX_ABS_LOGIT:
        return None
    ids, p = target_probabilities(z, query.sampler.sampling)
    return ids, p, threshold(p, query.sampler.typicality)
