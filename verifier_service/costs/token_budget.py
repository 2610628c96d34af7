"""The token budget: chooses a step's candidates for the highest goodput.

Every decoding session has its root in the step. Candidates are added in descending order of path probability q, as long
as the tokens that they bring per added second exceed the step's rate without them (Liu et al. 2024, "Optimizing
speculative decoding for serving large language models using goodput"). With n rows in the step, E expected tokens, and
S seconds of proposers before it, the next candidate pays if

    q  >=  break_even  =  E * (T_v(n + 1) - T_v(n)) / (T_v(n) + S)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from specdec.decoding.lookahead import Lookahead
from specdec.decoding.tree import BestNodes, Node
from verifier_service.costs.step_latency import StepLatency

EXPLORED_PROBABILITY = 0.1
"""To explore uncertain row costs, drafters are asked for candidates down to this probability."""


class RowPrice(NamedTuple):
    """The cost of one more row in a step, as estimated by the latency model."""

    seconds: float
    break_even: float
    """Candidates with a lower probability are left out because of this cost."""


class Selection(NamedTuple):
    """The candidates of a step."""

    nodes: list[list[Node]]
    """The candidates of each session, best first; always a connected tree."""
    price: RowPrice
    """The price of another row, the reason for leaving candidates out."""
    break_even: float
    """The break-even probability for drafters. Where row costs are uncertain, it is the optimistic one, so that there
    are candidates to try."""
    exploring: float | None = None
    """Only in a step that explores, with more or fewer rows than the estimate favours: the seconds that the favoured
    step would need for the same expected tokens."""


def select_candidates(
    offers: Sequence[BestNodes],
    latency: StepLatency,
    rows: int,
    most: int,
    spent: float = 0.0,
    *,
    explore: bool = False,
    leave_out: bool = True,
) -> Selection:
    """Choose the candidates that give the step the highest goodput, out of the sessions' offers.

    The step has `rows` rows already, each certain to bring a token; at most `most` rows are added. `spent`: seconds
    taken by the local draft or heads before the step.

    With `explore`, and if the latency model permits it now, the step may be an experiment. It adds candidates that may
    pay despite the estimate, up to the next measured point, or leaves out some that pay, to learn whether fewer rows
    cost as much as estimated. Block verification requires that whether a candidate is chosen depends on no probability
    of its descendants except its first child's. That holds if `leave_out` is False and `spent` does not depend on the
    offers.
    """
    ranked = sorted((-logprob, index) for index, offer in enumerate(offers) for logprob in offer.logprobs)
    ranked = ranked[: max(0, most)]
    gains = [math.exp(-negative) for negative, _ in ranked]
    seconds = latency.span(rows, rows + len(gains) + 2)
    expected, taken, break_even = float(rows), 0, rows * (seconds[1] - seconds[0]) / (seconds[0] + spent)
    for gain in gains:
        if gain < break_even:
            break
        taken += 1
        expected += gain
        break_even = expected * (seconds[taken + 1] - seconds[taken]) / (seconds[taken] + spent)
    paying, price = taken, RowPrice(seconds[taken + 1] - seconds[taken], break_even)
    if explore:
        least = _optimistic_break_even(expected, latency, rows + paying, spent)
        if paying < len(gains) and latency.may_explore and least <= gains[paying]:
            taken = min(len(gains), latency.next_point(rows + paying) - rows)
        elif leave_out:
            taken = min(paying, latency.uncertain_below(rows + paying, rows) - rows)
        if break_even > EXPLORED_PROBABILITY:
            break_even = min(break_even, max(least, EXPLORED_PROBABILITY))
    counts = [0] * len(offers)
    for _, index in ranked[:taken]:
        counts[index] += 1
    chosen = [offer.nodes[:count] for offer, count in zip(offers, counts, strict=True)]
    if taken == paying:
        return Selection(chosen, price, break_even)
    if taken < paying:  # with these candidates counted, break-even may exceed their probability
        price = price._replace(break_even=min(price.break_even, gains[paying - 1]))
    return Selection(chosen, price, break_even, seconds[paying] * (rows + sum(gains[:taken])) / expected)


def _optimistic_break_even(expected: float, latency: StepLatency, rows: int, spent: float) -> float:
    """Return a lower bound of the break-even probability between `rows` rows and the next measured point."""
    more, time = latency.next_point(rows), latency.of(rows)
    return expected * (latency.optimistic(rows, more) - time) / max(more - rows, 1) / (time + spent)


class WindowCosts:
    """The costs of lookahead windows, in tokens. The step has `rows` rows and is expected to bring `tokens` tokens
    without windows; r further rows cost tokens * (T_v(rows + r) / T_v(rows) - 1)."""

    def __init__(self, tokens: float, latency: StepLatency, rows: int) -> None:
        self._tokens, self._latency, self._rows = tokens, latency, rows
        self._without = latency.of(rows)
        self._costs: dict[int, float] = {}  # cached by rows, since every session of the step needs them

    def add(self, rows: int) -> None:
        """Add the rows of an opened window."""
        self._rows += rows
        self._without = self._latency.of(self._rows)
        self._costs.clear()

    def of(self, size: Lookahead) -> float:
        """Return the cost of a full window."""
        return self.of_rows(size.rows)

    def of_rows(self, rows: int) -> float:
        """Return the cost of `rows` more rows."""
        cost = self._costs.get(rows)
        if cost is None:
            cost = self._costs[rows] = self._in_tokens(self._latency.of(self._rows + rows))
        return cost

    def optimistic(self, size: Lookahead) -> float:
        """Return a lower bound on the cost of a full window; the cost itself where it is certain."""
        return self._in_tokens(self._latency.optimistic(self._rows, self._rows + size.rows))

    def explore(self) -> None:
        """Note that the coming step opens a window to learn its cost."""
        self._latency.explore(self._without)

    def _in_tokens(self, seconds: float) -> float:
        return self._tokens * (seconds / self._without - 1.0)
