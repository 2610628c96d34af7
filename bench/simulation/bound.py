"""Upper bound on tokens a second of any schedule, from the language and the devices alone.

A session's step verifies a tree. Let the step yield E tokens, the target's own included, with N candidates that have R
parent nodes. Then

- the target takes T_v(S (1 + N)) for a step of S sessions. T_v is convex, so that steps of unequal size take at least
  as long as equal ones (Jensen);
- the drafts have to compute R nodes for each step. A node's children are offered in one step only; then they are
  committed or contradicted. So no computed node serves two steps, and pods that together compute rho nodes a second
  sustain one step of S sessions in S R / rho seconds.

The rate is at most S E / max(T_v(S (1 + N)), S R / rho). The best trees follow from two prices, lambda for a candidate
and mu for computing a node: a candidate of path probability r is taken, and expanded, if its expected tokens are worth
the price. Before a node is computed, the draft does not know how certain it is below that node, so the decision to
compute depends on r alone. The worth of computing, W(r), follows from the worth of nodes further down,

    W(r) = -mu + sum over children with path probability c of max(0, c - lambda + max(0, W(c))),

in expectation over the kinds of text. The bound is the best rate over all prices. It ignores latency: every tree is
complete when its step begins, as if the drafts knew each verify result a whole step in advance and computed no useless
node. `ideal.py` shows how much of the bound remains without these assumptions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from bench.simulation.devices import Hardware
from bench.simulation.language import Language

CANDIDATE_PRICES = np.geomspace(2e-3, 0.95, 48)
READ_PRICES = np.concatenate([[0.0], np.geomspace(2e-3, 1.5, 23)])

RESOLUTION = 0.005
"""Resolution of path logprobs. Each edge's logprob is rounded up to a multiple, so that the bound stays valid."""

Grid = NDArray[np.float64]


@dataclass(frozen=True)
class Trees:
    """The best trees by price of a candidate and of computing a node. Each array is [len(CANDIDATE_PRICES),
    len(READ_PRICES)]: tokens E of a session's step, its candidates N and its computed nodes R."""

    tokens: Grid
    candidates: Grid
    reads: Grid


@cache
def trees(language: Language) -> Trees:
    """Return the best trees for every pair of prices."""
    candidate, read = CANDIDATE_PRICES[:, None], READ_PRICES[None, :]
    shape = (len(CANDIDATE_PRICES), len(READ_PRICES))
    least = math.log(CANDIDATE_PRICES[0])  # below this, no candidate is worth its price
    edges = [
        (int(-math.log(p) / RESOLUTION), share)
        for kind, share in zip(language.kinds, language.shares, strict=True)
        for p in kind
        if math.log(p) > least and share > 0
    ]
    levels = int(-least / RESOLUTION) + 1
    worth, tokens, candidates, reads = (np.zeros((levels, *shape)) for _ in range(4))
    for level in range(levels - 1, -1, -1):
        reads[level] += 1.0
        worth[level] -= read
        for edge, share in edges:
            below = level + edge
            if below >= levels:
                continue
            reach = math.exp(-below * RESOLUTION)
            goes_on = worth[below] > 0
            gain = reach - candidate + np.maximum(0.0, worth[below])
            taken = share * (gain > 0)
            worth[level] += taken * gain
            tokens[level] += taken * (reach + goes_on * tokens[below])
            candidates[level] += taken * (1.0 + goes_on * candidates[below])
            reads[level] += taken * goes_on * reads[below]
    drafted = worth[0] > 0
    return Trees(1.0 + drafted * tokens[0], drafted * candidates[0], drafted * reads[0])


def bound(language: Language, hardware: Hardware, sessions: int, drafts: int) -> float:
    """Return the bound on tokens a second of all `sessions`, with `drafts` pods."""
    plain = sessions / hardware.target.seconds(sessions)
    if not drafts:
        return plain
    best = trees(language)
    rows = sessions * (1.0 + best.candidates)
    target = hardware.target.base + hardware.target.row * rows
    target += hardware.target.beyond * np.maximum(0.0, rows - hardware.target.flat)
    reading = sessions * best.reads / (drafts * hardware.draft.most_rows_a_second)
    return max(plain, float((sessions * best.tokens / np.maximum(target, reading)).max()))
