"""Made-up models over a few tokens, given as distributions, and a test of whether texts follow one of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import product

import numpy as np
from numpy.typing import NDArray
from scipy import stats

FALSE_ALARM = 1e-6
VOCABULARY = 3
LENGTH = 3
"""Tokens of a text."""

LEAST_EXPECTED = 5.0
"""Minimum expected texts in a cell of a chi-square test; smaller cells are pooled."""

Path = tuple[int, ...]
Weights = NDArray[np.float64]
Logits = NDArray[np.float32]
Model = Callable[[Path], Weights]
"""The distribution of the next token after any path."""


def model(seed: int, vocabulary: int = VOCABULARY, *, sparse: bool = False) -> Model:
    """Return random distributions; if `sparse`, some tokens are ruled out."""

    @cache
    def after(path: Path) -> Weights:
        generator = np.random.default_rng([seed, *path])
        weights = generator.dirichlet(np.full(vocabulary, 0.7))
        if sparse:
            kept = generator.random(vocabulary) < 0.6
            kept[generator.integers(vocabulary)] = True
            weights = np.where(kept, weights + 1e-3, 0.0)
        return np.asarray(weights / weights.sum())

    return after


def certain(seed: int, vocabulary: int = VOCABULARY) -> Model:
    """Return distributions of one token each, as n-grams have."""
    return lambda path: np.eye(vocabulary)[np.random.default_rng([seed, *path]).integers(vocabulary)]


def constant(*weights: float) -> Model:
    """Return the same distribution after every path."""
    return lambda _: np.array(weights)


TARGET_OF_PAPER, DRAFT_OF_PAPER = constant(1 / 3, 2 / 3), constant(2 / 3, 1 / 3)
"""The example of Sun et al. 2024, section 2."""


def logits_of(weights: Weights) -> Logits:
    return np.log(weights).astype(np.float32)


def likelihood(p: Model, path: Path, known: int = 0) -> float:
    """Return the probability of a path, given its first tokens."""
    return float(np.prod([p(path[:i])[path[i]] for i in range(known, len(path))]))


def pvalue(counts: Counter[Path], p: Model, length: int = LENGTH, vocabulary: int = VOCABULARY) -> float:
    """Return the p-value of a chi-square test of texts of `length` tokens."""
    total = sum(counts.values())
    want = {path: total * likelihood(p, path) for path in product(range(vocabulary), repeat=length)}
    want = {path: expected for path, expected in want.items() if expected > 0}
    assert set(counts) <= set(want), "a token that the target rules out"
    cells = [[path] for path in want if want[path] >= LEAST_EXPECTED]
    cells.append([path for path in want if want[path] < LEAST_EXPECTED])
    cells = [cell for cell in cells if cell]
    observed = [sum(counts[path] for path in cell) for cell in cells]
    wanted = np.array([sum(want[path] for path in cell) for cell in cells])
    return float(stats.chisquare(observed, wanted * (total / wanted.sum())).pvalue)
