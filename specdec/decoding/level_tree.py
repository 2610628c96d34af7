"""Trees made level by level, for several texts together.

Medusa's heads (Cai et al. 2024) guess positions independently of one another: any guess for a position may follow any
guess for the position before. A path is given by the ranks of its guesses, and a tree is a selection of paths: either
the likeliest paths, or a fixed list, as published with Medusa's heads. Heads that read their own guesses (EAGLE) grow a
tree: the likeliest nodes of a level get children, and the likeliest nodes of all levels are kept (EAGLE-2's dynamic
trees, Li et al. 2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

GUESSES = 10
"""Guesses of a head for one position, as in the trees published with Medusa."""

MAX_NODES = 63
"""Maximum nodes of a tree, as in the trees published with Medusa."""


class LevelTrees(NamedTuple):
    """Trees of n texts, with m nodes at most. Parents precede their children. Smaller trees are padded with nodes of
    path log-probability -inf."""

    parents: NDArray[np.int64]  # [n, m]; 0: the root, i: node i - 1
    levels: NDArray[np.int64]  # [n, m], from 0
    ranks: NDArray[np.int64]  # [n, m], among the guesses for the level
    path_logprobs: NDArray[np.float64]  # [n, m]


def likeliest(logprobs: NDArray[np.float64], count: int) -> LevelTrees:
    """Return the trees of the `count` likeliest paths, likeliest first. The guesses' log-probabilities [n, levels,
    width] never rise along a row; -inf: no guess."""
    texts, levels, width = logprobs.shape
    every = np.arange(texts)[:, None]
    beam, offset = np.zeros((texts, 1)), 0  # path log-probabilities of the last level's nodes; number of its first node
    parents, ranks, scores = list[NDArray[np.int64]](), list[NDArray[np.int64]](), list[NDArray[np.float64]]()
    for level in range(levels):
        paths = (beam[:, :, None] + logprobs[:, level, None, :]).reshape(texts, -1)
        best = (-paths).argsort(axis=1, kind="stable")[:, :count]
        parents.append(best // width + offset)
        ranks.append(best % width)
        beam = paths[every, best]
        scores.append(beam)
        offset += 1 if level == 0 else parents[-2].shape[1]
    path_logprobs = np.concatenate(scores, axis=1)
    order, numbers = _best(path_logprobs, count)
    of_levels = np.repeat(np.arange(levels), [score.shape[1] for score in scores])
    return LevelTrees(
        numbers[every, np.concatenate(parents, axis=1)[every, order]],
        of_levels[order],
        np.concatenate(ranks, axis=1)[every, order],
        path_logprobs[every, order],
    )


def _best(path_logprobs: NDArray[np.float64], count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the indices of the `count` likeliest nodes, likeliest first, and their new numbers, by old number (0: the
    root, i: node i - 1)."""
    # A path is never likelier than its parent, and a stable sort keeps equal paths in the order of levels.
    order = (-path_logprobs).argsort(axis=1, kind="stable")[:, :count]
    numbers = np.zeros((len(path_logprobs), path_logprobs.shape[1] + 1), dtype=np.int64)
    np.put_along_axis(numbers, order + 1, np.arange(1, order.shape[1] + 1)[None], axis=1)
    return order, numbers


class FixedTree:
    """A tree that is the same for all texts, made from its paths of ranks, such as (0, 0, 2). ValueError, naming the
    path, if a path is empty, is given twice, or lacks its parent."""

    def __init__(self, paths: Sequence[Sequence[int]]) -> None:
        numbers: dict[tuple[int, ...], int] = {(): 0}
        parents = list[int]()
        for path in sorted(map(tuple, paths), key=lambda path: (len(path), path)):
            if path in numbers:
                raise ValueError(f"{list(path)} is {'empty' if not path else 'given twice'}")
            if path[:-1] not in numbers:
                raise ValueError(f"{list(path)} has no parent: {list(path[:-1])} is missing")
            parents.append(numbers[path[:-1]])
            numbers[path] = len(numbers)
        nodes = list(numbers)[1:]
        self._parents = np.array(parents, dtype=np.int64)
        self._levels = np.array([len(path) - 1 for path in nodes], dtype=np.int64)
        self._ranks = np.array([path[-1] for path in nodes], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._parents)

    def of(self, logprobs: NDArray[np.float64]) -> LevelTrees:
        """Return this tree for n texts, in the form returned by `likeliest`."""
        texts, nodes = len(logprobs), len(self)
        paths = np.zeros((texts, nodes + 1))
        own = logprobs[:, self._levels, self._ranks]
        for node, parent in enumerate(self._parents.tolist()):
            paths[:, node + 1] = paths[:, parent] + own[:, node]
        parents, levels, ranks = (
            np.broadcast_to(column, (texts, nodes)) for column in (self._parents, self._levels, self._ranks)
        )
        return LevelTrees(parents, levels, ranks, paths[:, 1:])


class GrownTrees(NamedTuple):
    """Nodes, at most m, of the trees grown for n texts. Parents precede their children. Smaller trees are padded with
    nodes of path log-probability -inf."""

    tokens: NDArray[np.int64]  # [n, m]
    parents: NDArray[np.int64]  # [n, m]; 0: the root, i: node i - 1
    logprobs: NDArray[np.float64]  # [n, m] given the parent
    path_logprobs: NDArray[np.float64]  # [n, m]


class GrowingTrees:
    """Token trees of n texts, grown one level at a time. Only the *frontier* gets children: initially the root, then
    the `beam` likeliest nodes of the last level. A path with a log-probability below `least` is not continued.

    `origins` [n, f]: the parent of each frontier node, as an index into the previous frontier. `tokens` and
    `path_logprobs` [n, f]: of the frontier nodes, likeliest first; -inf: no node."""

    def __init__(self, texts: int, beam: int, least: float = -np.inf) -> None:
        self._beam = beam
        self._least = least
        self._every = np.arange(texts)[:, None]
        self._numbers = np.zeros((texts, 1), dtype=np.int64)  # of the frontier's nodes; 0: the root
        self._count = 0  # nodes of a text
        self._levels: list[GrownTrees] = []
        self.origins = np.zeros((texts, 1), dtype=np.int64)
        self.tokens = np.zeros((texts, 1), dtype=np.int64)
        self.path_logprobs = np.zeros((texts, 1))

    def grow(self, tokens: NDArray[np.int64], logprobs: NDArray[np.float64]) -> None:
        """Add children [n, f, width] to the frontier, with log-probabilities at most 0 and falling; -inf: no child."""
        texts, _, width = tokens.shape
        paths = self.path_logprobs[:, :, None] + logprobs
        paths = np.where(paths >= self._least, paths, -np.inf).reshape(texts, -1)
        tokens = tokens.reshape(texts, -1)
        parents = self._numbers.repeat(width, axis=1)
        self._levels.append(GrownTrees(tokens, parents, logprobs.reshape(texts, -1), paths))
        best = (-paths).argsort(axis=1, kind="stable")[:, : self._beam]
        alive = max(1, int((paths[self._every, best] > -np.inf).sum(axis=1).max()))
        best = best[:, :alive]
        self._numbers = self._count + 1 + best
        self._count += paths.shape[1]
        self.origins, self.tokens, self.path_logprobs = (
            best // width,
            tokens[self._every, best],
            paths[self._every, best],
        )

    @property
    def nodes(self) -> GrownTrees:
        """All nodes, level by level, siblings in the order of their ranks."""
        return GrownTrees(*(np.concatenate(parts, axis=1) for parts in zip(*self._levels, strict=True)))

    def best(self, count: int) -> GrownTrees:
        """Return the `count` likeliest nodes of each tree, likeliest first."""
        tokens, parents, logprobs, paths = self.nodes
        order, numbers = _best(paths, count)
        of_parents = numbers[self._every, parents[self._every, order]]
        return GrownTrees(
            tokens[self._every, order], of_parents, logprobs[self._every, order], paths[self._every, order]
        )
