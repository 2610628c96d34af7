"""Validation of sampling parameters."""

from __future__ import annotations

import math

from specdec.decoding.sampling import Sampling

MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
"""Limits of the repetition penalty: beyond them, logits become so large or small that the penalty alone decides the
choice."""


def sampling_violations(sampling: Sampling, vocabulary: int, barred: frozenset[int]) -> list[tuple[str, str]]:
    """Return (field, problem) for every field with a value outside its range, one per field. `barred`: end tokens
    initially excluded by `min_tokens`; together with the banned ones they must not cover the vocabulary."""
    prefix = "sampling."
    found: list[tuple[str, str]] = []

    def check(field: str, value: float, good: bool, limit: str) -> bool:
        if not good:
            found.append((prefix + field, f"is {value:g}, must be {limit}"))
        return good

    s = sampling
    check("temperature", s.temperature, 0 <= s.temperature < math.inf, "a finite number of at least 0")
    check("top_p", s.top_p, 0 < s.top_p <= 1, "in (0, 1]")
    check("min_p", s.min_p, 0 <= s.min_p < 1, "in [0, 1)")
    least, most = MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY
    # The field is float32 on the wire, where 0.01 is slightly less.
    within = least * (1 - 1e-6) <= s.repetition_penalty <= most
    check("repetition_penalty", s.repetition_penalty, within, f"in [{least:g}, {most:g}]")
    check("frequency_penalty", s.frequency_penalty, -2 <= s.frequency_penalty <= 2, "in [-2, 2]")
    check("presence_penalty", s.presence_penalty, -2 <= s.presence_penalty <= 2, "in [-2, 2]")
    for token, bias in s.logit_bias.items():
        known = check(f"logit_bias[{token}]", token, token < vocabulary, f"keyed by a token id below {vocabulary}")
        if not (known and check(f"logit_bias[{token}]", bias, -100 <= bias <= 100, "in [-100, 100]")):
            break
    highest = max(s.banned_tokens, default=0)
    check("banned_tokens", highest, highest < vocabulary, f"a token id below {vocabulary}")
    if len(s.banned_tokens | barred) >= vocabulary:
        found.append((f"{prefix}banned_tokens", f"leaves none of the {vocabulary} tokens to choose"))
    return found
