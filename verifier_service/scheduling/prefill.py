"""Chunked prefill: chooses how many prompt tokens a step computes beside the sessions that decode.

A step with prompts is longer, and all decoding sessions wait for it; a prompt that is cut into small chunks takes
longer as a whole. As in Sarathi-Serve (Agrawal et al. 2024), the slowdown of a step is bounded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from verifier_service.costs.step_latency import StepLatency
from verifier_service.settings.tuning import DEFAULTS, PrefillTuning


class PrefillSlowdown:
    """A moving average: how many times as long as T_v(n) steps with prompts take. T_v is measured over short texts, but
    each row of a long prompt attends to all that is before it."""

    def __init__(self, tuning: PrefillTuning = DEFAULTS.prefill) -> None:
        self._tuning = tuning
        self.factor = 1.0

    def observe(self, expected: float, seconds: float) -> None:
        """Add a step with prompts that took `seconds` and was expected to take `expected` seconds."""
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
    """Return how many tokens of each prompt to compute: shares by `weights`, equal ones by default; what prompts leave
    of theirs goes to the others.

    `rows` of `decoding` sessions are in the step already, and `urgent_rows` of prompts that are not cut up for them.
    Without any, nobody is held up and `most` is the limit for the prompts. With some, `most`, or the next multiple of
    it that leaves room for `min_chunk_tokens`, limits all rows together, and so does the time that the step may take.
    """
    budget = most
    if decoding:
        prefills = max(1.0, len(remaining) / decoding)  # for each session that waits
        seconds = max((1.0 + tuning.max_decode_slowdown * prefills) * cost.of(rows), tuning.slice_seconds * prefills)
        full = most * math.ceil((rows + tuning.min_chunk_tokens) / most)
        budget = max(tuning.min_chunk_tokens, min(full, cost.rows_within(seconds / slowdown)) - rows - urgent_rows)
    weights = weights or [1.0] * len(remaining)
    shares = [0] * len(remaining)
    waiting = sum(weights)
    for index in sorted(range(len(remaining)), key=lambda index: remaining[index] / weights[index]):
        shares[index] = min(remaining[index], max(1, int(budget * weights[index] / max(waiting, weights[index]))))
        budget -= shares[index]
        waiting -= weights[index]
    return shares
