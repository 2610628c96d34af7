"""Divergences of a draft's next-token distribution q from the target's p, which training minimises, and the probability
that the draft's guess is then the target's token (docs/acceptance-rules.md).

Gu et al. 2024 (MiniLLM) compare forward and reverse KL. Agarwal et al. 2024 (GKD, equation 1) give the Jensen-Shannon
divergence between them. Zhou et al. 2024 (DistillSpec) use total variation, which is 1 minus REJECTION's acceptance.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Loss = Literal["forward", "reverse", "jsd", "tv"]

NAMES: dict[Loss, str] = {
    "forward": "forward KL",
    "reverse": "reverse KL",
    "jsd": "Jensen-Shannon divergence",
    "tv": "total variation",
}

MIN_LOG_P = -100.0
"""Lower bound on log p: a target may rule a token out, and 0 times infinity is not a number."""

ROWS = 64
"""Rows sorted at a time for acceptances; their float64 copies take 80 MB for a vocabulary of 150,000."""


def divergence(loss: Loss, log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return the divergence of each row, [...], of log-probabilities [..., V] of target and draft. It is in nats,
    except total variation, which is from 0 to 1."""
    log_p = log_p.clamp(min=MIN_LOG_P)
    p, q = log_p.exp(), log_q.exp()
    match loss:
        case "forward":
            return (p * (log_p - log_q)).sum(-1)
        case "reverse":
            return (q * (log_q - log_p)).sum(-1)
        case "jsd":
            log_m = torch.logaddexp(log_p, log_q) - math.log(2)
            return 0.5 * (p * (log_p - log_m) + q * (log_q - log_m)).sum(-1)
        case "tv":
            return 0.5 * (p - q).abs().sum(-1)


def overruled(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return where the target's likeliest token differs from the draft's, bool [...], for log-probabilities [..., V].

    Row i is the distribution of token i + 1. So row i - 1 shows whether the target overrules the draft's guess of token
    i.
    """
    return log_p.argmax(-1) != log_q.argmax(-1)


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
