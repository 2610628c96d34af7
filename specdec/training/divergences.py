"""Divergences of a draft's next-token distribution q from the target's p, which training minimises.

Gu et al. 2024 (MiniLLM) compare forward and reverse KL. Agarwal et al. 2024 (GKD, equation 1) give the Jensen-Shannon
divergence between them. Zhou et al. 2024 (DistillSpec) use total variation, which is 1 minus REJECTION's acceptance.
"""

from __future__ import annotations

import math
from typing import Literal

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
