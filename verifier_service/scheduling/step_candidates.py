"""Chooses the candidates and lookahead windows of a step: jointly for all tenants if that is fair, else tenant by
tenant.

The joint choice C has the highest goodput for the whole step (`token_budget.py`). C_i has the highest goodput for a
step of tenant i alone, and includes the windows that would open in it. With w_i the weight of tenant i and W the sum of
weights, C is used if every tenant gets at least its part of the token rate that it would have alone:

    E_i(C) / T(C)  >=  (w_i / W) * E_i(C_i) / A_i(C_i)          (`Division.is_fair`)

where E_i are the expected tokens of i's sessions (1 for a root, its path probability for a candidate), and T and A_i
the seconds of the joint step and of i's step alone. Otherwise tenant i gets C_i, or the best k_i candidates and windows
if its part of the step leaves room for k_i < |C_i| rows (`Division.candidate_rows`).

A session forced to speculate gets its best candidate even at a loss.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from specdec.decoding.lookahead import Lookahead
from specdec.decoding.tree import Node
from verifier_service.backend.result import LOOKAHEAD, Without
from verifier_service.costs.step_latency import StepLatency
from verifier_service.costs.token_budget import RowPrice, WindowCosts, select_candidates
from verifier_service.scheduling.step_shares import Division
from verifier_service.sessions.ngram import LookaheadRows
from verifier_service.sessions.running_session import RunningSession
from verifier_service.sessions.session import VerifierSession
from verifier_service.sessions.window_gain import Cost
from verifier_service.speculation.eligibility import Eligibility


class StepCandidates(NamedTuple):
    """The candidates and windows of a step's speculating sessions, by session index."""

    nodes: list[list[Node]]
    windows: list[LookaheadRows | None]
    prices: list[RowPrice]  # price of one more row, by session: candidates below its break-even are left out
    break_even: float  # down to which drafters should propose; optimistic where row costs are uncertain
    exploring: bool = False  # has fewer or more candidates than pay, to learn the cost of rows

    def why_none(self, place: int, best: float) -> Without:
        """Return why none of a session's candidates is in the step. `best`: the probability of the best one."""
        if best < self.prices[place].break_even:
            return Without.ROW_COST
        return Without.PROBED if self.exploring else Without.NO_ROOM


@dataclass
class Alone:
    """The candidates of a tenant in a step of its own."""

    places: list[int]  # indices of its sessions among the speculating ones
    roots: int
    nodes: list[list[Node]]
    price: RowPrice
    break_even: float
    rows: int = 0  # of lookahead windows

    @property
    def count(self) -> int:
        return sum(map(len, self.nodes))

    @property
    def extra(self) -> int:
        """Rows beyond its roots."""
        return self.count + self.rows

    @property
    def tokens(self) -> float:
        """Expected tokens."""
        return self.roots + sum(map(_tokens, self.nodes))


@dataclass(frozen=True)
class CandidateChoice:
    """The choice of candidates for one step. `spent`: seconds that proposers took before the step; `free`: number of
    tree slots, which limits the rows of candidates and windows together."""

    latency: StepLatency
    eligibility: Eligibility
    spent: float
    free: int

    def for_all(self, sessions: Sequence[VerifierSession], decoding: int, *, may_explore: bool) -> StepCandidates:
        """Choose the candidates and windows of `sessions`, in a step with `decoding` decoding sessions. `may_explore`:
        allow an experiment on the cost of rows. Callers allow it only if no prompt and no other tenant waits for the
        step."""
        offers = [session.candidates() for session in sessions]
        # A block's end must not depend on later draws (`block_verification.py`). So no experiment leaves draws out, and
        # the proposers' time is not counted: it tells how far they drew.
        blocks = any(session.block_verification for session in sessions)
        found = select_candidates(
            offers,
            self.latency,
            decoding,
            self.free,
            0.0 if blocks else self.spent,
            explore=decoding > 0 and may_explore,
            leave_out=not blocks,
        )
        if found.exploring is not None:
            self.latency.explore(found.exploring)
        _add_forced(sessions, found.nodes, self.free)
        left = self.free - sum(map(len, found.nodes))
        # One experiment a step: with two, their costs could not be told apart.
        may_explore = may_explore and found.exploring is None
        windows = self._open_windows(sessions, found.nodes, decoding, left, may_explore=may_explore)
        prices = [found.price] * len(sessions)
        return StepCandidates(found.nodes, windows, prices, found.break_even, found.exploring is not None)

    def by_tenant(
        self, speculating: Sequence[RunningSession], decoding: int, division: Division, *, may_explore: bool
    ) -> StepCandidates:
        """Choose the candidates and windows of `speculating` sessions, in a step with `decoding` decoding sessions,
        divided among tenants. The choice compares all sessions' candidates, so draws are verified one by one.
        `may_explore`: allow an experiment on the cost of rows, if it is fair and no tenant sits the step out."""
        sessions = [entry.session for entry in speculating]
        offers = [session.compare_candidates() for session in sessions]
        explore = may_explore and not division.sitting_out
        joint = select_candidates(offers, self.latency, decoding, self.free, self.spent, explore=explore)
        _add_forced(sessions, joint.nodes, self.free)
        own = {
            tenant: self._alone([sessions[i] for i in places], places, len(division.tenants[tenant].decoders))
            for tenant, places in _places(speculating).items()
        }
        windowed = sum(alone.rows for alone in own.values())
        rows = sum(map(len, joint.nodes)) + windowed
        got = {
            tenant: alone.roots + sum(_tokens(joint.nodes[i]) for i in alone.places) for tenant, alone in own.items()
        }
        # The joint choice has the highest total goodput: use it unless a tenant gets less than its part.
        if division.is_fair(rows, got, {tenant: (alone.extra, alone.tokens) for tenant, alone in own.items()}):
            # Open at most as many window rows as the tenants' separate steps have: `is_fair` counted these.
            left = min(self.free - sum(map(len, joint.nodes)), windowed)
            windows = self._open_windows(sessions, joint.nodes, decoding, left)
            if explores := joint.exploring is not None:
                self.latency.explore(joint.exploring)
            return StepCandidates(joint.nodes, windows, [joint.price] * len(sessions), joint.break_even, explores)
        return self._within_parts(sessions, own, division)

    def _alone(self, sessions: Sequence[VerifierSession], places: list[int], roots: int) -> Alone:
        """Return the candidates and window rows of a tenant's sessions in a step of their own."""
        offers = [session.candidates() for session in sessions]
        found = select_candidates(offers, self.latency, roots, self.free, self.spent)
        _add_forced(sessions, found.nodes, self.free)
        alone = Alone(places, roots, found.nodes, found.price, found.break_even)
        alone.rows = self._window_rows(sessions, alone.nodes, roots, self.free - alone.count)
        return alone

    def _within_parts(
        self, sessions: Sequence[VerifierSession], own: dict[str, Alone], division: Division
    ) -> StepCandidates:
        """Give each tenant the candidates and windows of its own step, as far as its part of this step allows."""
        allowed = division.candidate_rows({tenant: alone.extra for tenant, alone in own.items()})
        chosen: list[list[Node]] = [[] for _ in sessions]
        windows: list[LookaheadRows | None] = [None] * len(sessions)
        prices = [RowPrice(0.0, 0.0)] * len(sessions)
        free = self.free
        for tenant, alone in own.items():
            most, some, nodes = min(free, allowed[tenant]), [sessions[i] for i in alone.places], alone.nodes
            # Less room than in a step of its own: choose the best candidates again.
            if most < alone.count:
                offers = [session.candidates() for session in some]
                nodes = select_candidates(offers, self.latency, alone.roots, most, self.spent).nodes
            _add_forced(some, nodes, most)
            count = sum(map(len, nodes))
            opened = self._open_windows(some, nodes, alone.roots, most - count)
            free -= count + sum(len(window.nodes) for window in opened if window is not None)
            for i, of_session, window, paying in zip(alone.places, nodes, opened, alone.nodes, strict=True):
                chosen[i], windows[i] = of_session, window
                prices[i] = alone.price._replace(break_even=0.0) if paying and not of_session else alone.price
        return StepCandidates(chosen, windows, prices, min(alone.break_even for alone in own.values()))

    def _open_windows(
        self,
        sessions: Sequence[VerifierSession],
        chosen: Sequence[list[Node]],
        decoding: int,
        left: int,
        *,
        may_explore: bool = False,
    ) -> list[LookaheadRows | None]:
        """Open the lookahead windows of a step with `decoding` sessions. Return one entry per session of `sessions`.

        `chosen`: each session's candidates, to which those of Jacobi windows are appended in place; `left`: tree slots
        left for windows. If the step `may_explore`, a window may be opened to learn the cost of its rows.
        """
        costs = WindowCosts(decoding, self.latency, decoding + sum(map(len, chosen)))
        windows: list[LookaheadRows | None] = []
        for session, nodes in zip(sessions, chosen, strict=True):
            size = self._window_size(session, costs.of)
            exploring = size is None and may_explore and self.latency.may_explore
            if exploring:
                size = self._window_size(session, costs.optimistic)
            if size is not None and size.most_rows > left:
                size = None
            window = session.open_window(size)
            windows.append(window)
            if window is not None and size is not None:
                if exploring:  # the step measures the cost of rows, not the gain of windows
                    costs.explore()
                    may_explore = False  # one experiment a step
                else:
                    _charge(session, size, costs, window, nodes)
                planned = {id(node) for node in nodes}
                further = [node for node in window.candidates if id(node) not in planned and session.usable(node)]
                nodes += further[: max(0, session.policy.max_candidates - len(nodes))]
                costs.add(len(window.nodes))
                left -= len(window.nodes)
        return windows

    def _window_rows(
        self, sessions: Sequence[VerifierSession], chosen: Sequence[list[Node]], decoding: int, left: int
    ) -> int:
        """Return an estimate of the rows that `_open_windows` would add, counting each window at its largest size."""
        costs = WindowCosts(decoding, self.latency, decoding + sum(map(len, chosen)))
        rows = 0
        for session in sessions:
            size = self._window_size(session, costs.of)
            if size is not None and size.most_rows <= left - rows:
                rows += size.most_rows
                costs.add(size.most_rows)
        return rows

    def _window_size(self, session: VerifierSession, cost: Cost) -> Lookahead | None:
        """Return the size of a session's window; None: no window. A forced session that may use only windows always has
        one."""
        policy = session.policy
        if not policy.windows or session.chains_only or not self.eligibility.uses_proposers(session):
            return None
        if policy.lookahead is not None:
            return policy.lookahead
        if self.eligibility.uses_local_model(session):  # beside a local draft or heads a window gains little
            return None
        sizes, ngrams = session.window_sizes, session.ngrams
        size = ngrams.gain.wanted(sizes, cost, ngrams.size)
        return sizes[0] if size is None and policy.forced and policy.only_windows else size


def _add_forced(sessions: Sequence[VerifierSession], chosen: list[list[Node]], most: int) -> None:
    """Add the best candidate of each session that is forced to speculate and got none, up to `most` candidates in
    total."""
    left = most - sum(map(len, chosen))
    for place, session in enumerate(sessions):
        if left > 0 and session.policy.forced and not chosen[place] and (best := session.candidates().nodes):
            chosen[place] = best[:1]
            left -= 1


def _charge(
    session: VerifierSession, size: Lookahead, costs: WindowCosts, window: LookaheadRows, nodes: Sequence[Node]
) -> None:
    """Record the costs of a window and of candidates from windows, unless the request asks for windows at any cost."""
    if session.policy.lookahead is None and not session.policy.forced:
        gain = session.ngrams.gain
        gain.begin(size, session.window_sizes, costs.of)
        found = sum(node.origin == LOOKAHEAD for node in nodes)
        gain.charge(size, costs.of_rows(len(window.nodes)), costs.of_rows(found))


def _places(entries: Sequence[RunningSession]) -> dict[str, list[int]]:
    """Return the indices of each tenant's sessions."""
    found: defaultdict[str, list[int]] = defaultdict(list)
    for place, entry in enumerate(entries):
        found[entry.tenant].append(place)
    return found


def _tokens(nodes: Sequence[Node]) -> float:
    """Return the expected number of accepted candidates."""
    return sum(math.exp(node.path_logprob()) for node in nodes)
