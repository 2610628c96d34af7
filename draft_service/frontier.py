"""Nodes of a growing tree, those of highest reach first.

A commit changes the reach of all that survive it by the same amount, what has been committed: so the order stays, and
reaches are kept as they were at one fixed time.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Container, Iterator

from specdec.decoding.tree import Node


class Frontier:
    """A heap. Reaches are log-probabilities below the tree's present root."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Node]] = []  # (-reach below the first root, order, node)
        self._order = 0  # breaks ties: what came first goes first
        self._passed = 0.0  # log-reach of the present root below the first one

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Node]:
        return (node for _, _, node in self._heap)

    def add(self, logprob: float, node: Node) -> None:
        self._order += 1
        heapq.heappush(self._heap, (-logprob - self._passed, self._order, node))

    def best(self) -> tuple[float, Node]:
        """(reach, node); IndexError if there is none."""
        negative, _, node = self._heap[0]
        return -negative - self._passed, node

    def take(self) -> tuple[float, Node]:
        """The best, which leaves."""
        negative, _, node = heapq.heappop(self._heap)
        return -negative - self._passed, node

    def logprob_of(self, place: int) -> float:
        """Of the best (1), the second (2), ...; -inf if there are not so many."""
        entries = heapq.nsmallest(place, self._heap)
        return -entries[-1][0] - self._passed if len(entries) == place else -math.inf

    def descend(self, passed: float, alive: Container[Node]) -> None:
        """The root has moved down by a log-reach of `passed`; only nodes that are `alive` stay."""
        self._passed += passed
        self._heap = [entry for entry in self._heap if entry[2] in alive]
        heapq.heapify(self._heap)

    def clear(self) -> None:
        self._heap, self._passed = [], 0.0
