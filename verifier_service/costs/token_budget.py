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

EXPLORED_PROBABILITY = 0.1
"""Candidates from this probability on are asked for where it is not certain that they do not pay."""

Offers = Iterable[tuple[float, Node]]
"""A session's candidates, best first, each with its path logprob: as many as the session may have in a step."""


class Selection(NamedTuple):
    """The candidates of a step."""

    nodes: list[list[Node]]
    """Those of each session, best first and always a connected tree."""
    price: float
    """The break-even probability: a further candidate pays from this probability on. Where it is not certain what rows
    cost, it is the least that it may be, so that there are candidates to try."""
    exploring: float | None = None
    """If the step has more or fewer rows than pay as far as is known, to learn what they cost: the seconds that a step
    of those that pay would take for as many tokens."""


def select_candidates(
    offers: Sequence[Offers], latency: StepLatency, rows: int, most: int, spent: float = 0.0, *, explore: bool = False
) -> Selection:
    """Return the candidates that raise the goodput of a step.

    `rows` rows are in the step already, and each is sure to bring a token; at most `most` rows are added. `spent` are
    the seconds that the local draft model has taken before the step. With `explore`, and if the latency lets this step
    try, candidates that do not pay as far as is known are taken as well, up to the next measured point, if they may
    pay; or some that pay are left out, to learn whether fewer are as dear as believed.
    """
    roots, expected, time = rows, float(rows), latency.of(rows)
    price = expected * (latency.of(rows + 1) - time) / (time + spent)
    taken: list[tuple[int, Node]] = []
    gains: list[float] = []
    paying: int | None = None  # candidates that pay, if the step explores beyond them
    limit = math.inf  # rows up to which it does
    ranked = heapq.merge(*map(_numbered, count(), offers), key=lambda offer: offer[0])
    for negative_reach, index, node in islice(ranked, most):
        gain = math.exp(-negative_reach)
        if gain < price and paying is None:
            may_pay = explore and latency.may_explore and _optimistic_price(expected, latency, rows, spent) <= gain
            if not may_pay:
                break
            paying, limit = len(taken), latency.next_point(rows)
        if rows == limit:
            break
        taken.append((index, node))
        gains.append(gain)
        rows += 1
        if paying is None:
            expected, time = expected + gain, latency.of(rows)
            price = expected * (latency.of(rows + 1) - time) / (time + spent)
    if explore and price > EXPLORED_PROBABILITY:
        least = _optimistic_price(expected, latency, roots + (len(taken) if paying is None else paying), spent)
        price = min(price, max(least, EXPLORED_PROBABILITY))
    if explore and paying is None:
        fewer = latency.uncertain_below(rows, roots) - roots
        if fewer < len(taken):
            paying, taken = len(taken), taken[:fewer]
    chosen: list[list[Node]] = [[] for _ in offers]
    for index, node in taken:
        chosen[index].append(node)
    if paying is None:
        return Selection(chosen, price)
    return Selection(chosen, price, time * (roots + sum(gains[: len(taken)])) / (roots + sum(gains[:paying])))


def _optimistic_price(expected: float, latency: StepLatency, rows: int, spent: float) -> float:
    """Return the least that the break-even probability may be between `rows` rows and the next measured point."""
    more, time = latency.next_point(rows), latency.of(rows)
    return expected * (latency.optimistic(rows, more) - time) / max(more - rows, 1) / (time + spent)


def _numbered(index: int, offers: Offers) -> Iterator[tuple[float, int, Node]]:
    for path_logprob, node in offers:
        yield -path_logprob, index, node


class WindowCosts:
    """The costs of lookahead windows, in tokens, when they are added to a step of `rows` rows that is expected to bring
    `tokens` tokens without them. If the step `may_explore`, one window may be cheaper than it seems."""

    def __init__(self, tokens: float, latency: StepLatency, rows: int, *, may_explore: bool = False) -> None:
        self._tokens, self._latency, self._rows = tokens, latency, rows
        self._may_explore = may_explore
        self._prices: dict[Lookahead, float] = {}  # the cost of each size; every session of the step asks for it

    def add(self, rows: int) -> None:
        """Add the rows of a window that was opened."""
        self._rows += rows
        self._prices.clear()

    def affordable(self, sizes: Sequence[Lookahead], gain: float) -> Lookahead | None:
        """Return the first size of window that costs at most `gain`, the tokens a step that it brings; None if all cost
        more. Where it is not certain that the last one, the smallest, does, it is tried."""
        size = next((size for size in sizes if self._of(size) <= gain), None)
        if size is None and sizes and self._may_explore and self._latency.may_explore:
            without, least = (
                self._latency.of(self._rows),
                self._latency.optimistic(self._rows, self._rows + sizes[-1].rows),
            )
            if self._tokens * (least / without - 1.0) <= gain:
                self._may_explore = False
                self._latency.explore(without)
                return sizes[-1]
        return size

    def _of(self, size: Lookahead) -> float:
        price = self._prices.get(size)
        if price is None:
            with_it, without = self._latency.of(self._rows + size.rows), self._latency.of(self._rows)
            price = self._prices[size] = self._tokens * (with_it / without - 1.0)
        return price
