"""Trees from guesses by level: every guess for a position may follow every guess for the one before it.

Heads guess positions independently of one another (Medusa, Cai et al. 2024), so a tree is a choice among the paths of
ranks. It is either the likeliest ones, as in EAGLE-2's dynamic trees (Li et al. 2024), or a fixed list, as published
with Medusa's heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

GUESSES = 10
"""Guesses of a head for one position, as in the trees published with Medusa."""

MAX_NODES = 63
"""Maximum nodes of a tree, as in those."""


class LevelTrees(NamedTuple):
    """Trees of n texts, with m nodes at most. Parents precede their children; a node beyond the end of a smaller tree
    has a path log-probability of -inf."""

    parents: NDArray[np.int64]  # [n, m]; 0: the root, i: node i - 1
    levels: NDArray[np.int64]  # [n, m], from 0
    ranks: NDArray[np.int64]  # [n, m], among the guesses for the level
    path_logprobs: NDArray[np.float64]  # [n, m]


def likeliest(logprobs: NDArray[np.float64], count: int) -> LevelTrees:
    """Return the trees of the `count` likeliest paths, likeliest first, from the log-probabilities [n, levels, width]
    of guesses, which never rise along a row; -inf: no guess."""
    texts, levels, width = logprobs.shape
    every = np.arange(texts)[:, None]
    beam, offset = np.zeros((texts, 1)), 0  # path log-probabilities of the last level's nodes; the number of the first
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
    # A path is never likelier than the one above it, and a stable sort leaves equal ones in the order of levels.
    order = (-path_logprobs).argsort(axis=1, kind="stable")[:, :count]
    numbers = np.zeros((texts, path_logprobs.shape[1] + 1), dtype=np.int64)  # by old number; the root keeps 0
    numbers[every, order + 1] = np.arange(1, order.shape[1] + 1)
    of_levels = np.repeat(np.arange(levels), [score.shape[1] for score in scores])
    return LevelTrees(
        numbers[every, np.concatenate(parents, axis=1)[every, order]],
        of_levels[order],
        np.concatenate(ranks, axis=1)[every, order],
        path_logprobs[every, order],
    )


class FixedTree:
    """A tree that is the same for all texts, from its paths of ranks, such as (0, 0, 2). ValueError, naming the path,
    if one is empty, is given twice, or continues none of the others."""

    def __init__(self, paths: Sequence[Sequence[int]]) -> None:
        numbers: dict[tuple[int, ...], int] = {(): 0}
        parents = list[int]()
        for path in sorted(map(tuple, paths), key=lambda path: (len(path), path)):
            if path in numbers:
                raise ValueError(f"{list(path)} is {'empty' if not path else 'given twice'}")
            if path[:-1] not in numbers:
                raise ValueError(f"{list(path)} continues no other path: {list(path[:-1])} is missing")
            parents.append(numbers[path[:-1]])
            numbers[path] = len(numbers)
        nodes = list(numbers)[1:]
        self._parents = np.array(parents, dtype=np.int64)
        self._levels = np.array([len(path) - 1 for path in nodes], dtype=np.int64)
        self._ranks = np.array([path[-1] for path in nodes], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._parents)

    def of(self, logprobs: NDArray[np.float64]) -> LevelTrees:
        """Return this tree for n texts, as `likeliest` does."""
        texts, nodes = len(logprobs), len(self)
        paths = np.zeros((texts, nodes + 1))
        own = logprobs[:, self._levels, self._ranks]
        for node, parent in enumerate(self._parents.tolist()):
            paths[:, node + 1] = paths[:, parent] + own[:, node]
        parents, levels, ranks = (
            np.broadcast_to(column, (texts, nodes)) for column in (self._parents, self._levels, self._ranks)
        )
        return LevelTrees(parents, levels, ranks, paths[:, 1:])
