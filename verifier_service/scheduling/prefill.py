"""Chunked prefill: chooses how many prompt tokens a step computes beside the sessions that decode.

A step with prompts is longer, and all decoding sessions wait for it; a prompt that is cut into small chunks takes
longer as a whole. As in Sarathi-Serve (Agrawal et al. 2024), the slowdown of a step is bounded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from verifier_service.costs.step_latency import StepLatency

MAX_DECODE_SLOWDOWN = 0.7
"""Fraction of its length by which prompts may lengthen a step of decoding sessions; it may take PREFILL_SLICE_SECONDS
in any case. If more sessions prefill than decode, both limits rise in proportion."""

PREFILL_SLICE_SECONDS = 0.025
"""Seconds that a step with prompts may always take: hardly any reader notices, and small chunks make prompts slower."""

SLOWDOWN_SMOOTHING = 0.5

MIN_CHUNK_TOKENS = 8
"""Least number of tokens by which all prompts together advance in a step."""


class PrefillSlowdown:
    """A moving average: how many times as long as T_v(n) steps with prompts take. T_v is measured over short texts, but
    each row of a long prompt attends to all that is before it."""

    def __init__(self) -> None:
        self.factor = 1.0

    def observe(self, expected: float, seconds: float) -> None:
        """Add a step with prompts that took `seconds` and was expected to take `expected` seconds."""
        self.factor += SLOWDOWN_SMOOTHING * (max(1.0, seconds / expected) - self.factor)


def prefill_chunks(
    remaining: Sequence[int], decoding: int, cost: StepLatency, rows: int, most: int, slowdown: float = 1.0
) -> list[int]:
    """Return how many tokens of each prompt to compute: equal shares; what short prompts leave goes to the long ones.

    `rows` of `decoding` sessions are in the step already. Without any, nobody is held up and `most` is the limit for
    the prompts. With some, `most`, or the next multiple of it that leaves room for MIN_CHUNK_TOKENS, limits all rows
    together, and so does the time that the step may take.
    """
    budget = most
    if decoding:
        prefills = max(1.0, len(remaining) / decoding)  # for each session that waits
        seconds = max((1.0 + MAX_DECODE_SLOWDOWN * prefills) * cost.of(rows), PREFILL_SLICE_SECONDS * prefills)
        full = most * math.ceil((rows + MIN_CHUNK_TOKENS) / most)
        budget = max(MIN_CHUNK_TOKENS, min(full, cost.rows_within(seconds / slowdown)) - rows)
    shares = [0] * len(remaining)
    waiting = len(remaining)
    for index in sorted(range(len(remaining)), key=remaining.__getitem__):
        shares[index] = min(remaining[index], max(1, budget // waiting))
        budget -= shares[index]
        waiting -= 1
    return shares
