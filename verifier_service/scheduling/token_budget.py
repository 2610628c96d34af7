"""Which candidates a step verifies: those that raise its goodput.

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
from verifier_service.scheduling.step_latency import StepLatency

Offers = Iterable[tuple[float, Node]]
"""A session's candidates, best first, each with its log-probability: as many as it may have in a step."""


class Selection(NamedTuple):
    """The nodes to verify of each session, best first, always a connected tree; and the break-even probability, from
    which on a further candidate would have paid."""

    nodes: list[list[Node]]
    price: float


def select_candidates(
    offers: Sequence[Offers], latency: StepLatency, rows: int, most: int, spent: float = 0.0
) -> Selection:
    """`rows` are in the step already, and a token is sure to come of each; at most `most` rows are added. Seconds have
    been `spent` on guesses for it."""
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
    """What lookahead windows cost, in tokens, that are added to a step of `rows` rows which is expected to bring
    `tokens` without them."""

    def __init__(self, tokens: float, latency: StepLatency, rows: int) -> None:
        self._tokens, self._latency, self._rows = tokens, latency, rows
        self._prices: dict[Lookahead, float] = {}  # asked for by every session of the step

    def add(self, rows: int) -> None:
        """A window has taken so many more."""
        self._rows += rows
        self._prices.clear()

    def affordable(self, sizes: Sequence[Lookahead], gain: float) -> Lookahead | None:
        """The first size of window that costs no more than it brings: `gain` tokens a step."""
        return next((size for size in sizes if self._of(size) <= gain), None)

    def _of(self, size: Lookahead) -> float:
        price = self._prices.get(size)
        if price is None:
            with_it, without = self._latency.of(self._rows + size.rows), self._latency.of(self._rows)
            price = self._prices[size] = self._tokens * (with_it / without - 1.0)
        return price
