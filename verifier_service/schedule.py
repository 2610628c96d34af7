"""What goes into a step: whose candidates, and how much of whose prompt.

Every decoding session has its tip in the step. A further row is taken while it pays: a candidate while what it
is expected to bring, per second that it costs, is more than the step brings per second without it (goodput,
after Liu et al. 2024, "Optimizing speculative decoding for serving large language models using goodput");
rows of prompts while they do not hold up those who are decoding for too long.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from itertools import islice

from specdec.decoding.tree import Node, TokenTree
from verifier_service.cost import StepCost

STRETCH = 0.7
"""Prompts make a step of decoding sessions longer by at most this part of it; by more where more wait than are
held up, in proportion."""

LEAST_PROMPT_ROWS = 8
"""A prompt goes on by so many tokens a step at least, however dear they are."""


def candidates(trees: Sequence[tuple[TokenTree, int]], cost: StepCost, rows: int, most: int) -> list[list[Node]]:
    """The nodes to verify of each tree, best first: always a connected tree.

    `trees` come with the number of nodes each may have at most; `rows` are in the step already, a token is sure
    to come of each tree; at most `most` rows are added.
    """
    chosen: list[list[Node]] = [[] for _ in trees]
    if not any(limit for _, limit in trees):
        return chosen
    offers = [_offers(index, tree, limit) for index, (tree, limit) in enumerate(trees)]
    expected, time = float(len(trees)), cost.of(rows)
    for negative_reach, index, node in islice(heapq.merge(*offers, key=lambda offer: offer[0]), most):
        longer = cost.of(rows + 1)
        gain = math.exp(-negative_reach)
        if gain * time < expected * (longer - time):
            break
        expected, time, rows = expected + gain, longer, rows + 1
        chosen[index].append(node)
    return chosen


def _offers(index: int, tree: TokenTree, limit: int) -> Iterator[tuple[float, int, Node]]:
    for reach, node in islice(tree.by_reach(), limit):
        yield -reach, index, node


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
