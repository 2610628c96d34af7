"""The token budget: chooses the candidates that a step verifies, those that raise its goodput.

Every decoding session has its root in the step. A candidate is added while the tokens that it is expected to bring, per
second that it takes, are more than the step brings per second without it (Liu et al. 2024, "Optimizing speculative
decoding for serving large language models using goodput").
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, islice
from typing import NamedTuple

from specdec.decoding.lookahead import Lookahead
from specdec.decoding.tree import Node
from verifier_service.costs.step_latency import StepLatency

Offers = Iterable[tuple[float, Node]]
"""A session's candidates, best first, each with its path logprob: as many as the session may have in a step."""


class Selection(NamedTuple):
    """The nodes of each session to verify, best first and always a connected tree, and the break-even probability (as
    `price`): from which on a further candidate would have paid."""

    nodes: list[list[Node]]
    price: float


def select_candidates(
    offers: Sequence[Offers], latency: StepLatency, rows: int, most: int, spent: float = 0.0
) -> Selection:
    """Return the candidates that raise the goodput of a step.

    `rows` rows are in the step already, and each is sure to bring a token; at most `most` rows are added. `spent` are
    the seconds that the local draft model has taken before the step.
    """
    chosen: list[list[Node]] = [[] for _ in offers]
    ranked = heapq.merge(*map(_numbered, count(), offers), key=lambda offer: offer[0])
    expected, time = float(rows), latency.of(rows)
    price = expected * (latency.of(rows + 1) - time) / (time + spent)
    for negative_reach, index, node in islice(ranked, most):
        gain = math.exp(-negative_reach)
        if gain < price:
            break
        expected, rows = expected + gain, rows + 1
        time = latency.of(rows)
        price = expected * (latency.of(rows + 1) - time) / (time + spent)
        chosen[index].append(node)
    return Selection(chosen, price)


def _numbered(index: int, offers: Offers) -> Iterator[tuple[float, int, Node]]:
    for path_logprob, node in offers:
        yield -path_logprob, index, node


class WindowCosts:
    """The costs of lookahead windows, in tokens, when they are added to a step of `rows` rows that is expected to bring
    `tokens` tokens without them."""

    def __init__(self, tokens: float, latency: StepLatency, rows: int) -> None:
        self._tokens, self._latency, self._rows = tokens, latency, rows
        self._prices: dict[Lookahead, float] = {}  # the cost of each size; every session of the step asks for it

    def add(self, rows: int) -> None:
        """Add the rows of a window that was opened."""
        self._rows += rows
        self._prices.clear()

    def affordable(self, sizes: Sequence[Lookahead], gain: float) -> Lookahead | None:
        """Return the first size of window that costs at most `gain`, the tokens a step that it brings; None if all cost
        more."""
        return next((size for size in sizes if self._of(size) <= gain), None)

    def _of(self, size: Lookahead) -> float:
        price = self._prices.get(size)
        if price is None:
            with_it, without = self._latency.of(self._rows + size.rows), self._latency.of(self._rows)
            price = self._prices[size] = self._tokens * (with_it / without - 1.0)
        return price
