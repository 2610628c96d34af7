"""What goes into a step: whose candidates, and how much of whose prompt.

Every decoding session has its tip in the step. A further row is taken while it pays: a candidate while what it
is expected to bring, per second that it costs, is more than the step brings per second without it (goodput,
after Liu et al. 2024, "Optimizing speculative decoding for serving large language models using goodput");
rows of prompts while they do not hold up those who are decoding for too long.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, islice
from typing import NamedTuple

from specdec.decoding.lookahead import Lookahead
from specdec.decoding.tree import Node
from verifier_service.cost import StepCost

STRETCH = 0.7
"""Prompts make a step of decoding sessions longer by at most this part of it, or as long as a BLINK; by more, or as
long as several, where more wait than are held up, in proportion."""

BLINK = 0.025
"""Seconds that hardly anybody notices: commits of undrafted sessions are joined for as long, and steps with prompts may
take as long, since a prompt costs the more the smaller its pieces are."""

DEARNESS_LEARNS = 0.5

LEAST_PROMPT_ROWS = 8
"""A prompt goes on by so many tokens a step at least, however dear they are."""


Offers = Iterable[tuple[float, Node]]
"""A session's candidates, best first, each with its reach: as many as it may have in a step."""


class Choice(NamedTuple):
    """The nodes to verify of each session, best first, always a connected tree; and the price of one more: the
    probability from which a further candidate would have paid."""

    nodes: list[list[Node]]
    price: float


def candidates(offers: Sequence[Offers], cost: StepCost, rows: int, most: int, spent: float = 0.0) -> Choice:
    """`rows` are in the step already, and a token is sure to come of each; at most `most` rows are added. Seconds have
    been `spent` on guesses for it."""
    chosen: list[list[Node]] = [[] for _ in offers]
    ranked = heapq.merge(*map(_numbered, count(), offers), key=lambda offer: offer[0])
    expected, time = float(rows), cost.of(rows)
    price = expected * (cost.of(rows + 1) - time) / (time + spent)
    for negative_reach, index, node in islice(ranked, most):
        gain = math.exp(-negative_reach)
        if gain < price:
            break
        expected, rows = expected + gain, rows + 1
        time = cost.of(rows)
        price = expected * (cost.of(rows + 1) - time) / (time + spent)
        chosen[index].append(node)
    return Choice(chosen, price)


def _numbered(index: int, offers: Offers) -> Iterator[tuple[float, int, Node]]:
    for reach, node in offers:
        yield -reach, index, node


class WindowPrices:
    """What lookahead windows cost, in tokens, that are added to a step of `rows` rows which is expected to bring
    `tokens` without them."""

    def __init__(self, tokens: float, cost: StepCost, rows: int) -> None:
        self._tokens, self._cost, self._rows = tokens, cost, rows
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
            with_it, without = self._cost.of(self._rows + size.rows), self._cost.of(self._rows)
            price = self._prices[size] = self._tokens * (with_it / without - 1.0)
        return price


class Dearness:
    """How many times as long steps with prompts take, of late, as so many rows behind short texts, which T_v(n) is
    known for: each row of a long prompt reads all that is before it."""

    def __init__(self) -> None:
        self.factor = 1.0

    def observe(self, expected: float, seconds: float) -> None:
        self.factor += DEARNESS_LEARNS * (max(1.0, seconds / expected) - self.factor)


def prompt_rows(
    remaining: Sequence[int], decoding: int, cost: StepCost, rows: int, most: int, dearness: float = 1.0
) -> list[int]:
    """How many tokens of each prompt to compute: equal shares, and what the short ones leave goes to the long.

    `rows` of `decoding` sessions are in the step already; without any, nobody is held up and `most` is the limit. With
    some, all rows together are as many, or a multiple of it.
    """
    budget = most
    if decoding:
        readers = max(1.0, len(remaining) / decoding)  # of prompts, for each who is held up
        seconds = max((1.0 + STRETCH * readers) * cost.of(rows), BLINK * readers)
        full = most * math.ceil((rows + LEAST_PROMPT_ROWS) / most)
        budget = max(LEAST_PROMPT_ROWS, min(full, cost.rows_within(seconds / dearness)) - rows)
    shares = [0] * len(remaining)
    waiting = len(remaining)
    for index in sorted(range(len(remaining)), key=remaining.__getitem__):
        shares[index] = min(remaining[index], max(1, budget // waiting))
        budget -= shares[index]
        waiting -= 1
    return shares
