"""The probability that a draft's guess is the target's token, given both distributions (docs/acceptance-rules.md)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

ROWS = 64
"""Rows sorted at a time; their float64 copies take 80 MB for a vocabulary of 150,000."""


class Acceptance(NamedTuple):
    """Mean probabilities that a draft's first guess is accepted."""

    greedy: float  # at temperature 0: both have the same likeliest token
    coupled: float  # at temperature 1, by the rule COUPLED
    rejection: float  # at temperature 1, by the rule REJECTION: 1 - TV, the upper bound of COUPLED

    def __str__(self) -> str:
        return f"{self.greedy:.1%} at temperature 0, {self.coupled:.1%} at 1 ({self.rejection:.1%} by REJECTION)"


def acceptance(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return the three probabilities of `Acceptance`, float64 [n, 3], for log-probabilities [n, V] of target and
    draft."""
    found = []
    for begin in range(0, len(log_p), ROWS):
        p, q = (rows[begin : begin + ROWS].double().exp() for rows in (log_p, log_q))
        same = (p.argmax(-1) == q.argmax(-1)).double()
        found.append(torch.stack([same, coupled(p, q), torch.minimum(p, q).sum(-1)], -1))
    return torch.cat(found)


def coupled(p: Tensor, q: Tensor) -> Tensor:
    """Return the probability, [n], that the same Gumbel noise makes target and draft choose the same token:
    sum_i 1 / sum_j max(p_j / p_i, q_j / q_i) (Daliri et al. 2024), for probabilities [n, V].

    The larger ratio is p's where p_j / q_j >= p_i / q_i. These are the tokens up to i in descending order of p / q, so
    two running sums give all V inner sums.
    """
    order = (p.log() - q.log()).nan_to_num(nan=0.0).argsort(-1, descending=True)  # NaN: both are 0
    p, q = p.gather(-1, order), q.gather(-1, order)
    up_to = p.cumsum(-1)
    after = q.flip(-1).cumsum(-1).flip(-1) - q
    both = p * q
    return torch.where(both > 0, both / (up_to * q + after * p), 0.0).sum(-1)
