"""The token budget: chooses the candidates that a step verifies, those that raise its goodput.

Every decoding session has its root in the step. A candidate is added while the tokens that it is expected to bring, per
second that it takes, are more than the step brings per second without it (Liu et al. 2024, "Optimizing speculative
decoding for serving large language models using goodput").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from specdec.decoding.lookahead import Lookahead
from specdec.decoding.tree import BestNodes, Node
from verifier_service.costs.step_latency import StepLatency

EXPLORED_PROBABILITY = 0.1
"""Candidates from this probability on are asked for where it is not certain that they do not pay."""


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
    offers: Sequence[BestNodes],
    latency: StepLatency,
    rows: int,
    most: int,
    spent: float = 0.0,
    *,
    explore: bool = False,
) -> Selection:
    """Return the candidates that raise the goodput of a step, out of those that each session may have in it.

    `rows` rows are in the step already, and each is sure to bring a token; at most `most` rows are added. `spent` are
    the seconds that the local draft model has taken before the step. With `explore`, and if the latency lets this step
    try, candidates that do not pay as far as is known are taken as well, up to the next measured point, if they may
    pay; or some that pay are left out, to learn whether fewer are as dear as believed.
    """
    ranked = sorted((-logprob, index) for index, offer in enumerate(offers) for logprob in offer.logprobs)[:most]
    gains = [math.exp(-negative) for negative, _ in ranked]
    seconds = latency.span(rows, rows + len(gains) + 2)
    expected, taken, price = float(rows), 0, rows * (seconds[1] - seconds[0]) / (seconds[0] + spent)
    for gain in gains:
        if gain < price:
            break
        taken += 1
        expected += gain
        price = expected * (seconds[taken + 1] - seconds[taken]) / (seconds[taken] + spent)
    paying = taken
    if explore:
        least = _optimistic_price(expected, latency, rows + paying, spent)
        if paying < len(gains) and latency.may_explore and least <= gains[paying]:
            taken = min(len(gains), latency.next_point(rows + paying) - rows)
        else:
            taken = min(paying, latency.uncertain_below(rows + paying, rows) - rows)
        if price > EXPLORED_PROBABILITY:
            price = min(price, max(least, EXPLORED_PROBABILITY))
    counts = [0] * len(offers)
    for _, index in ranked[:taken]:
        counts[index] += 1
    chosen = [offer.nodes[:count] for offer, count in zip(offers, counts, strict=True)]
    if taken == paying:
        return Selection(chosen, price)
    return Selection(chosen, price, seconds[paying] * (rows + sum(gains[:taken])) / expected)


def _optimistic_price(expected: float, latency: StepLatency, rows: int, spent: float) -> float:
    """Return the least that the break-even probability may be between `rows` rows and the next measured point."""
    more, time = latency.next_point(rows), latency.of(rows)
    return expected * (latency.optimistic(rows, more) - time) / max(more - rows, 1) / (time + spent)


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
