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
"""Prompts make a step of decoding sessions longer by at most this part of it; by more where more wait than are
held up, in proportion."""

LEAST_PROMPT_ROWS = 8
"""A prompt goes on by so many tokens a step at least, however dear they are."""


Offers = Iterable[tuple[float, Node]]
"""A session's candidates, best first, each with its reach: as many as it may have in a step."""


class Choice(NamedTuple):
    """The nodes to verify of each session, best first, always a connected tree; and the price of one more: the
    probability from which a further candidate would have paid."""

    nodes: list[list[Node]]
    price: float


def candidates(offers: Sequence[Offers], cost: StepCost, rows: int, most: int) -> Choice:
    """`rows` are in the step already, a token is sure to come of each session; at most `most` rows are added."""
    chosen: list[list[Node]] = [[] for _ in offers]
    ranked = heapq.merge(*map(_numbered, count(), offers), key=lambda offer: offer[0])
    expected, time = float(len(offers)), cost.of(rows)
    price = expected * (cost.of(rows + 1) / time - 1.0)
    for negative_reach, index, node in islice(ranked, most):
        gain = math.exp(-negative_reach)
        if gain < price:
            break
        expected, rows = expected + gain, rows + 1
        time = cost.of(rows)
        price = expected * (cost.of(rows + 1) / time - 1.0)
        chosen[index].append(node)
    return Choice(chosen, price)


def _numbered(index: int, offers: Offers) -> Iterator[tuple[float, int, Node]]:
    for reach, node in offers:
        yield -reach, index, node


def window_size(sizes: Sequence[Lookahead], gain: float, tokens: float, cost: StepCost, rows: int) -> Lookahead | None:
    """The first size of window that costs no more than it brings: `gain` tokens a step. The step has `rows` rows
    and is expected to bring `tokens` without it."""
    for size in sizes:
        if tokens * (cost.of(rows + size.rows) / cost.of(rows) - 1.0) <= gain:
            return size
    return None


def prompt_rows(remaining: Sequence[int], decoding: int, cost: StepCost, rows: int, most: int) -> list[int]:
    """How many tokens of each prompt to compute: equal shares, and what the short ones leave goes to the long.

    `rows` of `decoding` sessions are in the step already; without any, nobody is held up and `most` is the limit.
    """
    budget = most
    if decoding:
        patience = 1.0 + STRETCH * max(1.0, len(remaining) / decoding)
        budget = min(most, max(LEAST_PROMPT_ROWS, cost.rows_within(patience * cost.of(rows)) - rows))
    shares = [0] * len(remaining)
    waiting = len(remaining)
    for index in sorted(range(len(remaining)), key=remaining.__getitem__):
        shares[index] = min(remaining[index], max(1, budget // waiting))
        budget -= shares[index]
        waiting -= 1
    return shares
