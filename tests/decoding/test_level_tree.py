"""Trees of guesses by level: the likeliest paths, and fixed ones."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from specdec.decoding.level_tree import FixedTree, LevelTrees, likeliest

Path = tuple[int, ...]


def paths_of(trees: LevelTrees, text: int) -> dict[Path, float]:
    """Return the nodes of a text's tree as paths of ranks, with their log-probabilities; parents must come first."""
    found: list[Path] = [()]
    for parent, level, rank in zip(trees.parents[text], trees.levels[text], trees.ranks[text], strict=True):
        assert parent < len(found)
        assert len(found[parent]) == level
        found.append((*found[parent], int(rank)))
    assert len(set(found)) == len(found)
    return dict(zip(found[1:], trees.path_logprobs[text].tolist(), strict=True))


def every_path(logprobs: NDArray[np.float64]) -> dict[Path, float]:
    """Return all paths of a text with their log-probabilities."""
    levels, width = logprobs.shape
    return {
        path: sum(float(logprobs[level, rank]) for level, rank in enumerate(path))
        for depth in range(1, levels + 1)
        for path in itertools.product(range(width), repeat=depth)
    }


@st.composite
def guesses(draw: st.DrawFn) -> NDArray[np.float64]:
    """Log-probabilities [n, levels, width] that never rise along a row; some are 0, some -inf."""
    shape = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    number = st.one_of(st.just(0.0), st.just(-math.inf), st.floats(-8.0, 0.0))
    numbers = draw(st.lists(number, min_size=math.prod(shape), max_size=math.prod(shape)))
    return -np.sort(-np.array(numbers).reshape(shape), axis=2)


@given(guesses(), st.integers(1, 40))
def test_the_likeliest_paths_are_those_of_a_search_over_all(logprobs: NDArray[np.float64], count: int) -> None:
    trees = likeliest(logprobs, count)
    for text, own in enumerate(logprobs):
        found, every = paths_of(trees, text), every_path(own)
        assert len(found) == min(count, len(every))
        assert list(found.values()) == sorted(found.values(), reverse=True)
        want = sorted(every.values(), reverse=True)[: len(found)]
        np.testing.assert_allclose(list(found.values()), want, atol=1e-12)
        for path, logprob in found.items():
            assert logprob == pytest.approx(every[path], abs=1e-12)


@given(guesses())
def test_a_fixed_tree_of_all_paths_has_their_log_probabilities(logprobs: NDArray[np.float64]) -> None:
    tree = FixedTree(list(every_path(logprobs[0])))
    trees = tree.of(logprobs)
    for text, own in enumerate(logprobs):
        found, every = paths_of(trees, text), every_path(own)
        assert found.keys() == every.keys()
        assert all(found[path] == pytest.approx(every[path], abs=1e-12) for path in found)


@pytest.mark.parametrize(
    ("paths", "why"),
    [
        ([[0], []], r"\[\] is empty"),
        ([[0], [0]], r"\[0\] is given twice"),
        ([[0], [1, 0]], r"\[1, 0\] continues no other path: \[1\] is missing"),
    ],
)
def test_paths_that_are_no_tree_are_named(paths: list[list[int]], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        FixedTree(paths)
