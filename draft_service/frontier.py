"""The frontier: a token tree's nodes by path logprob, highest first.

A commit shifts the path logprob of every surviving node by the committed path's logprob. The order does not change, so
the heap stores logprobs relative to the first root.
"""

from __future__ import annotations

import heapq
from collections.abc import Container, Iterator

from specdec.decoding.tree import Node


class Frontier:
    """A heap of nodes. Path logprobs in its interface are relative to the tree's current root."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Node]] = []  # (-path logprob from the first root, order, node)
        self._order = 0  # breaks ties: first in, first out
        self._passed = 0.0  # path logprob of the current root, relative to the first

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Node]:
        return (node for _, _, node in self._heap)

    def add(self, logprob: float, node: Node) -> None:
        self._order += 1
        heapq.heappush(self._heap, (-logprob - self._passed, self._order, node))

    def best(self) -> tuple[float, Node]:
        """Return (path logprob, node) of the best node; IndexError if there is none."""
        negative, _, node = self._heap[0]
        return -negative - self._passed, node

    def pop_best(self) -> tuple[float, Node]:
        """Remove the best node; return (path logprob, node)."""
        negative, _, node = heapq.heappop(self._heap)
        return -negative - self._passed, node

    def remove(self, node: Node) -> bool:
        """Remove this node; return False if it is not in the heap."""
        for place, (_, _, other) in enumerate(self._heap):
            if other is node:
                del self._heap[place]
                heapq.heapify(self._heap)
                return True
        return False

    def descend(self, passed: float, alive: Container[Node]) -> None:
        """Follow the root down a path of logprob `passed`; nodes that are not `alive` are dropped."""
        self._passed += passed
        self._heap = [entry for entry in self._heap if entry[2] in alive]
        heapq.heapify(self._heap)

    def rescore(self) -> None:
        """Compute all path logprobs again: logprobs of nodes have changed."""
        self._heap = [(-node.path_logprob() - self._passed, order, node) for _, order, node in self._heap]
        heapq.heapify(self._heap)

    def clear(self) -> None:
        self._heap, self._passed = [], 0.0
