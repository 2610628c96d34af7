"""Trees by level: of the likeliest paths of guesses, of fixed paths, and trees that grow from their own guesses."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from specdec.decoding.level_tree import FixedTree, GrowingTrees, LevelTrees, likeliest

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
        ([[0], [1, 0]], r"\[1, 0\] has no parent: \[1\] is missing"),
    ],
)
def test_paths_that_are_no_tree_are_named(paths: list[list[int]], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        FixedTree(paths)


WIDTH = 3
"""Children of a node in the tests of growing trees."""


def children(seed: int, path: Path) -> tuple[list[int], list[float]]:
    """Return the tokens and log-probabilities of a path's children, by seed and path; some are equal, some -inf."""
    random = np.random.default_rng([seed, *path])
    logprobs = np.sort(random.choice([-0.1, -0.5, -1.0, -2.5, -math.inf], WIDTH))[::-1]
    return random.permutation(9)[:WIDTH].tolist(), logprobs.tolist()


def grown(seeds: list[int], levels: int, beam: int, least: float = -math.inf) -> GrowingTrees:
    """Grow trees of texts with these seeds, as their owner does: `origins` and `tokens` give each level's paths."""
    trees = GrowingTrees(len(seeds), beam, least)
    paths: list[list[Path]] = [[()] for _ in seeds]
    for level in range(levels):
        if level:
            paths = [
                [(*own[origin], token) for origin, token in zip(origins, tokens, strict=True)]
                for own, origins, tokens in zip(paths, trees.origins.tolist(), trees.tokens.tolist(), strict=True)
            ]
        below = [[children(seed, path) for path in own] for seed, own in zip(seeds, paths, strict=True)]
        trees.grow(
            np.array([[tokens for tokens, _ in own] for own in below]),
            np.array([[logprobs for _, logprobs in own] for own in below]),
        )
    return trees


def searched(seed: int, levels: int, beam: int, least: float) -> dict[Path, float]:
    """Return the nodes of one text's tree, grown node by node."""
    found: dict[Path, float] = {}
    frontier: dict[Path, float] = {(): 0.0}
    for _ in range(levels):
        level: dict[Path, float] = {}
        for path, logprob in frontier.items():
            for token, own in zip(*children(seed, path), strict=True):
                if logprob + own >= least and own > -math.inf:
                    level[*path, token] = logprob + own
        found |= level
        frontier = dict(sorted(level.items(), key=lambda item: -item[1])[:beam])
    return found


def tokens_of(trees: GrowingTrees, text: int, count: int) -> dict[Path, float]:
    """Return the `count` likeliest nodes of a text's tree as paths of tokens; parents must come first."""
    best, found = trees.best(count), list[Path]([()])
    nodes = zip(best.tokens[text], best.parents[text], best.logprobs[text], best.path_logprobs[text], strict=True)
    logprobs: list[float] = [0.0]
    for token, parent, own, path_logprob in nodes:
        if path_logprob == -math.inf:
            break
        assert parent < len(found)
        assert path_logprob == pytest.approx(logprobs[parent] + own, abs=1e-12)
        found.append((*found[parent], int(token)))
        logprobs.append(float(path_logprob))
    assert len(set(found)) == len(found)
    assert logprobs == sorted(logprobs, reverse=True)
    return dict(zip(found[1:], logprobs[1:], strict=True))


@given(
    st.lists(st.integers(0, 99), min_size=1, max_size=3),
    st.integers(1, 4),
    st.integers(1, 5),
    st.sampled_from([-math.inf, -2.0]),
    st.integers(1, 60),
)
def test_a_grown_tree_has_the_nodes_of_a_search_node_by_node(
    seeds: list[int], levels: int, beam: int, least: float, count: int
) -> None:
    trees = grown(seeds, levels, beam, least)
    for text, seed in enumerate(seeds):
        want = searched(seed, levels, beam, least)
        assert tokens_of(trees, text, 1000) == pytest.approx(want)
        part = tokens_of(trees, text, count)
        assert list(part.values()) == pytest.approx(sorted(want.values(), reverse=True)[:count])


def test_the_frontier_is_known_by_its_parents() -> None:
    trees = GrowingTrees(1, 2)
    trees.grow(np.array([[[5, 6, 7]]]), np.array([[[-0.2, -0.3, -4.0]]]))
    assert trees.origins.tolist() == [[0, 0]]
    assert trees.tokens.tolist() == [[5, 6]]
    trees.grow(np.array([[[1, 2], [3, 4]]]), np.array([[[-2.0, -3.0], [-0.1, -0.2]]]))
    assert trees.origins.tolist() == [[1, 1]]
    assert trees.tokens.tolist() == [[3, 4]]
    assert trees.path_logprobs[0].tolist() == pytest.approx([-0.4, -0.5])
    nodes = trees.nodes
    assert nodes.tokens.tolist() == [[5, 6, 7, 1, 2, 3, 4]]
    assert nodes.parents.tolist() == [[0, 0, 0, 1, 1, 2, 2]]
    best = trees.best(4)
    assert best.tokens.tolist() == [[5, 6, 3, 4]]
    assert best.parents.tolist() == [[0, 0, 2, 2]]


def test_a_tree_whose_paths_have_all_ended_grows_no_more() -> None:
    trees = GrowingTrees(1, 2)
    trees.grow(np.array([[[5, 6]]]), np.full((1, 1, 2), -np.inf))
    assert trees.path_logprobs.tolist() == [[-math.inf]]
    trees.grow(np.array([[[7, 8]]]), np.array([[[-0.1, -0.2]]]))
    assert (trees.best(9).path_logprobs == -np.inf).all()
