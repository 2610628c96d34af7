"""Chunked prefill: how many prompt tokens a step computes beside decoding sessions.

A step with prompts is longer, and all decoding sessions wait for it; smaller chunks make the prompt itself take longer.
As in Sarathi-Serve (Agrawal et al. 2024), the slowdown of a step is bounded. With r rows of d decoding sessions, P
prompts and slowdown s, chunks of c tokens in total are within the time limit if

    s * T_v(r + c) <= max((1 + max_decode_slowdown * k) * T_v(r), slice_seconds * k),    k = max(1, P / d)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from verifier_service.costs.step_latency import StepLatency
from verifier_service.settings.tuning import DEFAULTS, PrefillTuning


class PrefillSlowdown:
    """Moving average of (duration of steps with prompts) / T_v(n). T_v is measured over short texts, but a row of a
    long prompt attends to everything before it."""

    def __init__(self, tuning: PrefillTuning = DEFAULTS.prefill) -> None:
        self._tuning = tuning
        self.factor = 1.0

    def observe(self, expected: float, seconds: float) -> None:
        """Add a step with prompts: its duration and its expected duration by T_v, in seconds."""
        self.factor += self._tuning.slowdown_smoothing * (max(1.0, seconds / expected) - self.factor)


def prefill_chunks(
    remaining: Sequence[int],
    decoding: int,
    cost: StepLatency,
    rows: int,
    most: int,
    slowdown: float = 1.0,
    tuning: PrefillTuning = DEFAULTS.prefill,
    weights: Sequence[float] | None = None,
    urgent_rows: int = 0,
) -> list[int]:
    """Return how many tokens of each prompt to compute, at least one. The prompts share the budget by `weights`
    (default: equally), and the unused share of a short prompt goes to the others (max-min).

    The step already has `rows` rows of `decoding` sessions and `urgent_rows` rows of urgent prompts. Without decoding
    sessions, `most` alone limits the prompts, urgent ones included. With decoding sessions, the lowest multiple of
    `most` that leaves room for `min_chunk_tokens` limits all rows together, and the time limit in the module docstring
    applies too.
    """
    budget = most - urgent_rows
    if decoding:
        prefills = max(1.0, len(remaining) / decoding)  # per decoding session: many prompts may take more of a step
        seconds = max((1.0 + tuning.max_decode_slowdown * prefills) * cost.of(rows), tuning.slice_seconds * prefills)
        full = most * math.ceil((rows + tuning.min_chunk_tokens) / most)
        # At least `min_chunk_tokens`: a prompt must progress even if decoding alone fills the step.
        budget = max(tuning.min_chunk_tokens, min(full, cost.rows_within(seconds / slowdown)) - rows - urgent_rows)
    weights = weights or [1.0] * len(remaining)
    shares = [0] * len(remaining)
    waiting = sum(weights)
    # Smallest need per weight first: its unused share is then divided among the rest.
    for index in sorted(range(len(remaining)), key=lambda index: remaining[index] / weights[index]):
        shares[index] = min(remaining[index], max(1, int(budget * weights[index] / max(waiting, weights[index]))))
        budget -= shares[index]
        waiting -= weights[index]
    return shares
