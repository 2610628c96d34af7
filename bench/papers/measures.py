"""The measures of the papers, as pure functions of counts and times.

Speed-up, mean accepted tokens and the spread over runs follow Spec-Bench (Xia et al. 2024, arXiv 2401.07851, its
`evaluation/speed.py`); conditional acceptance follows SPEED-Bench (arXiv 2604.09557). A histogram of accepted
candidates is a list: entry i is the number of steps that accepted i candidates, not counting the bonus token.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import pairwise, zip_longest
from typing import TypeVar

from bench.diversity import distinct, entropy

Key = TypeVar("Key", bound=Hashable)

ORDERS = (1, 2, 3)
"""Lengths of the n-grams of words whose diversity is measured."""


def ratio_of_means(mine: Mapping[Key, float], plain: Mapping[Key, float]) -> float | None:
    """Return Spec-Bench's speed-up: mean tokens a second divided by plain decoding's mean, over the questions that both
    have; None if there are none."""
    both = mine.keys() & plain.keys()
    if not both:
        return None
    return statistics.fmean(mine[key] for key in both) / statistics.fmean(plain[key] for key in both)


def median_ratio(mine: Mapping[Key, float], plain: Mapping[Key, float]) -> float | None:
    """Return the median of the questions' ratios, over the questions that both have; None if there are none."""
    both = mine.keys() & plain.keys()
    return statistics.median(mine[key] / plain[key] for key in both) if both else None


def spread(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean over runs and their sample standard deviation; for a single run the deviation is None."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


def mean_accepted_tokens(tokens: int, steps: int) -> float | None:
    """Return the mean number of tokens a step (MAT), bonus included: 1 for plain decoding; None without steps.

    If a text ends within a step, only the tokens it kept count; Spec-Bench counts all tokens of that step.
    """
    return tokens / steps if steps else None


def merged(histograms: Iterable[Sequence[int]]) -> list[int]:
    """Return the sum of histograms of any lengths."""
    return [sum(counts) for counts in zip_longest(*histograms, fillvalue=0)]


def survival(histogram: Sequence[int]) -> list[float]:
    """Return P(at least k candidates are accepted in a step) for k = 1, 2, ... up to the most ever accepted."""
    total = sum(histogram)
    most = max((k for k, steps in enumerate(histogram) if steps), default=0)
    return [sum(histogram[k:]) / total for k in range(1, most + 1)]


def conditional_acceptance(histogram: Sequence[int]) -> list[float]:
    """Return P(at least k accepted) / P(at least k - 1 accepted) for k = 1, 2, ... up to the most ever accepted.

    A step without a candidate at place k counts as rejecting one there.
    """
    chances = [1.0, *survival(histogram)]
    return [after / before for before, after in pairwise(chances)]


def equal_tokens(mine: Sequence[Sequence[int]], plain: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Return (tokens compared, equal tokens) over the texts of all turns, position by position; a token that only one
    text has counts as compared and unequal."""
    compared = equal = 0
    for one, other in zip_longest(mine, plain, fillvalue=()):
        compared += max(len(one), len(other))
        equal += sum(a == b for a, b in zip(one, other, strict=False))
    return compared, equal


def words(text: str) -> list[str]:
    """Return the words of a text: runs of letters, digits and underscores, case kept."""
    return re.findall(r"\w+", text)


def diversity(texts: Sequence[str]) -> dict[str, float]:
    """Return entropy (bits) and distinct-n of word n-grams, computed within each text and averaged over texts; a text
    without such n-grams counts as 0."""
    found = [words(text) for text in texts]
    measured = {f"entropy {n}": [entropy(text, n) for text in found] for n in ORDERS}
    measured |= {f"distinct {n}": [distinct(text, n) for text in found] for n in ORDERS}
    return {name: statistics.fmean(values) for name, values in measured.items()}
