"""The frontier: nodes of a token tree by path logprob, the highest first.

A commit changes the path logprobs of all surviving nodes by the same amount, that of the committed path. So their order
stays, and the heap keeps them relative to one fixed root.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Container, Iterator

from specdec.decoding.tree import Node


class Frontier:
    """A heap of nodes. The path logprobs that it takes and returns count from the tree's present root."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Node]] = []  # (-path logprob from the first root, order, node)
        self._order = 0  # breaks ties: first in, first out
        self._passed = 0.0  # path logprob of the present root, from the first one

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

    def take(self) -> tuple[float, Node]:
        """Remove the best node and return it as `best` does."""
        negative, _, node = heapq.heappop(self._heap)
        return -negative - self._passed, node

    def logprob_of(self, place: int) -> float:
        """Return the path logprob of the best node (1), the second (2), ...; -inf if there are fewer."""
        entries = heapq.nsmallest(place, self._heap)
        return -entries[-1][0] - self._passed if len(entries) == place else -math.inf

    def descend(self, passed: float, alive: Container[Node]) -> None:
        """Follow the root, which has moved down a path of logprob `passed`; only nodes that are `alive` stay."""
        self._passed += passed
        self._heap = [entry for entry in self._heap if entry[2] in alive]
        heapq.heapify(self._heap)

    def clear(self) -> None:
        self._heap, self._passed = [], 0.0
