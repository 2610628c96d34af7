"""Chunked prefill: how many prompt tokens a step computes beside the sessions that decode.

A step with prompts is longer, and everybody who decodes waits for it; a prompt that is cut into small chunks takes
longer as a whole. As in Sarathi-Serve (Agrawal et al. 2024), the slowdown of a step is bounded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from verifier_service.scheduling.step_latency import StepLatency

MAX_DECODE_SLOWDOWN = 0.7
"""Prompts make a step of decoding sessions longer by at most this part of it, or as long as PREFILL_SLICE_SECONDS.
Where more sessions prefill than decode, by more, in proportion."""

PREFILL_SLICE_SECONDS = 0.025
"""A step with prompts may take so long in any case: hardly anybody notices, and small chunks make a prompt dearer."""

SLOWDOWN_SMOOTHING = 0.5

MIN_CHUNK_TOKENS = 8
"""All prompts together go on by so many tokens a step at least."""


class PrefillSlowdown:
    """How many times as long steps with prompts take, of late, as T_v(n) says: it is measured over short texts, and
    each row of a long prompt attends to all that is before it."""

    def __init__(self) -> None:
        self.factor = 1.0

    def observe(self, expected: float, seconds: float) -> None:
        """Add a step with prompts that was expected to take so many seconds."""
        self.factor += SLOWDOWN_SMOOTHING * (max(1.0, seconds / expected) - self.factor)


def prefill_chunks(
    remaining: Sequence[int], decoding: int, cost: StepLatency, rows: int, most: int, slowdown: float = 1.0
) -> list[int]:
    """How many tokens of each prompt to compute: equal shares, and what the short ones leave goes to the long.

    `rows` of `decoding` sessions are in the step already; without any, nobody is held up and `most` is the limit. With
    some, all rows together are as many, or a multiple of it.
    """
    budget = most
    if decoding:
        prefills = max(1.0, len(remaining) / decoding)  # for each session that is held up
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
