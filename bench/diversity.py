"""Diversity of a text, measured by its n-grams of tokens or of words.

Entropy as in Zhang et al., "Generating Informative and Diverse Conversational Responses via Adversarial Information
Maximization" (2018); distinct-n as in Li et al., "A Diversity-Promoting Objective Function for Neural Conversation
Models" (2016).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence


def ngrams(tokens: Sequence[Hashable], n: int) -> list[tuple[Hashable, ...]]:
    """Return each run of `n` tokens, in order."""
    return list(zip(*(tokens[i:] for i in range(n)), strict=False))


def entropy(tokens: Sequence[Hashable], n: int) -> float:
    """Return the entropy of the n-grams' frequencies, in bits; 0 without n-grams."""
    counts = Counter(ngrams(tokens, n))
    total = counts.total()
    return math.fsum(-count / total * math.log2(count / total) for count in counts.values())


def distinct(tokens: Sequence[Hashable], n: int) -> float:
    """Return the number of different n-grams divided by the number of all n-grams; 0 without n-grams."""
    found = ngrams(tokens, n)
    return len(set(found)) / len(found) if found else 0.0
