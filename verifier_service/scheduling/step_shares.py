"""Shares of a step: the sessions in it, and the time that each tenant's rows may add.

Every session of a step waits for all rows of the step, so a tenant with many rows slows down a tenant with few, however
fairly they share memory. Processor sharing (Kleinrock 1967) would give each tenant present a machine W / w times as
slow, with w its weight and W the sum of weights. A step keeps this guarantee for all tenants if it takes at most

    B = min over tenants i of  (W / w_i) * A_i,      A_i = T_v(rows of i) + other costs of i

where A_i is the time of a step with the rows of i alone; the other costs are grammars and proposers. The tenant v at
the minimum has all its rows in the step. The others divide the rest, B - A_v = (sum of their weights / w_v) * A_v, by
weighted max-min fairness. Each tenant admits its sessions, longest waiting first, while their cost fits; the rest sit
the step out. A tenant's unused part carries over as credit (deficit round robin, Shreedhar and Varghese 1995), so a
session costing more than a whole part runs every few steps. No session starves, and the guarantee holds on average, up
to one such session.

Rows beyond the roots (candidates, lookahead windows, chunks of prompts) get the rest of the tenant's part. No session
sits out if extra rows are free or there is only one tenant.

The bound is only as good as the estimate of A_v, and while tenants share steps, no step has the rows of v alone. So an
occasional step has only these rows, to measure A_v. These steps are counted over all tenants: what they measure depends
on the number of rows, not on the tenant, and with many tenants v changes all the time.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from specdec.serving.fair_turns import SharedBudget
from verifier_service.backend.result import VerifyResult
from verifier_service.costs.step_latency import StepLatency
from verifier_service.sessions.running_session import RunningSession

TOLERANCE = 1e-9
"""Relative rounding error of sums of seconds."""

BESIDE_SMOOTHING = 0.2
"""Weight of the latest step in the moving average of a session's costs besides rows."""

MEASURED_FIRST, MEASURED_EVERY, MEASURED_LATER = 2, 4, 64
"""One tenant's rows are measured alone twice at first, four steps apart, then in every 64th step, which costs the other
tenants a sixty-fourth of their part. More measurements at first would distort the measurements of drafts."""

REMEMBERED = 1024
"""Maximum tenants whose grammar cost is remembered."""


@dataclass
class Presence:
    """A tenant in a step: its ready sessions, and their cost alone."""

    weight: float
    decoders: list[RunningSession] = field(default_factory=list)
    prompts: list[RunningSession] = field(default_factory=list)
    beside: float = 0.0  # seconds that its decoders cost besides rows
    prompt_rows: int = 0

    @property
    def rows(self) -> int:
        return len(self.decoders) + self.prompt_rows


@dataclass
class Division:
    """The division of one step among the tenants present."""

    latency: StepLatency
    tenants: dict[str, Presence]
    credit: dict[str, float]  # seconds of decoding that each tenant carries over to the next step
    prompt_debt: dict[str, float] = field(default_factory=dict)  # overdraft of its prompts, in seconds
    taking_part: list[RunningSession] = field(default_factory=list)  # decoding sessions
    sitting_out: list[RunningSession] = field(default_factory=list)
    prompt_seconds: dict[str, float] = field(default_factory=dict)
    """Seconds that a tenant's chunks of prompts may add to the step; tenants without an entry have no limit."""

    used: float = 0.0  # seconds of the step taken by roots and prompts, or kept as credit
    measures: bool = False  # measures one tenant's rows alone

    @property
    def takes_all(self) -> bool:
        """True if every session takes part, and no tenant's credit changes."""
        return not (self.measures or self.sitting_out or self.credit)

    def alone(self, tenant: str, extra: int = 0) -> float:
        """Return the seconds of a step with the rows of one tenant, plus `extra` rows of candidates and windows."""
        presence = self.tenants[tenant]
        return self.latency.of(presence.rows + extra) + presence.beside

    def bound(self, extra: Mapping[str, int]) -> tuple[float, str]:
        """Return the bound B in seconds, and the tenant v that sets it; `extra`: each tenant's rows of candidates and
        windows in a step of its own."""
        total = sum(presence.weight for presence in self.tenants.values())
        slowed = {
            tenant: total / presence.weight * self.alone(tenant, extra.get(tenant, 0))
            for tenant, presence in self.tenants.items()
        }
        least = min(slowed, key=slowed.__getitem__)
        return slowed[least], least

    def is_fair(self, rows: int, got: Mapping[str, float], wanted: Mapping[str, tuple[int, float]]) -> bool:
        """Return whether, in a step with `rows` rows of candidates and windows, every tenant gets at least its part of
        the token rate that it would have alone. `got`: each tenant's tokens in that step, by default its roots;
        `wanted`: its (rows of candidates and windows, tokens) in a step of its own, by default no such rows.

        Token rates decide: a joint choice of candidates may exceed the bound B and still bring every tenant more.
        """
        if self.sitting_out:
            return False
        total = sum(presence.weight for presence in self.tenants.values())
        seconds = self.used + self._slower_by(len(self.taking_part), rows)
        for tenant, presence in self.tenants.items():
            roots = len(presence.decoders)
            extra, tokens = wanted.get(tenant, (0, roots))
            part = presence.weight / total * tokens / self.alone(tenant, extra)
            if got.get(tenant, roots) / seconds * (1 + TOLERANCE) < part:
                return False
        return True

    def candidate_rows(self, extra: Mapping[str, int]) -> dict[str, int]:
        """Return how many rows of candidates and windows each tenant may have; `extra`: the number it would have alone.
        Tenants with sessions sitting the step out get none: the rest of their part becomes credit for those sessions,
        since their roots bring more tokens than candidates would."""
        bound, least = self.bound(extra)
        rows = len(self.taking_part)
        left = bound - self.used - self._slower_by(rows, extra.get(least, 0))
        rows += extra.get(least, 0)
        found = {least: extra.get(least, 0)}
        held_up = {entry.tenant for entry in self.sitting_out}
        wanted = {
            tenant: math.inf if tenant in held_up else self._slower_by(rows, extra.get(tenant, 0))
            for tenant in self.tenants
            if tenant != least
        }
        budget = SharedBudget(left, {tenant: self.tenants[tenant].weight for tenant in wanted})
        for tenant in budget.order(wanted):
            part = budget.part(tenant)
            if tenant in held_up:
                self.credit[tenant] = self.credit.get(tenant, 0.0) + part
                found[tenant] = 0
                budget.take(tenant, part)
            else:
                most = self.latency.rows_within(self.latency.of(rows) + part) - rows
                found[tenant] = max(0, min(extra.get(tenant, 0), most))
                budget.take(tenant, self._slower_by(rows, found[tenant]))
                rows += found[tenant]
        return found

    def _slower_by(self, rows: int, more: int) -> float:
        """Return the seconds that `more` rows add to a step of `rows` rows."""
        return self.latency.of(rows + more) - self.latency.of(rows)


class StepShares:
    """Divides steps among tenants; owned by the step loop's thread."""

    def __init__(self, prefill_rows: int) -> None:
        """`prefill_rows`: limit on a step's rows of prompts."""
        self._prefill_rows = prefill_rows
        self._steps = 0
        self._measurements, self._measured_at = 0, -MEASURED_EVERY  # steps that measured, and the last of them
        self._usual: OrderedDict[str, float] = OrderedDict()  # a grammar's seconds in a step, by tenant
        self.credit: dict[str, float] = {}
        """Seconds that a tenant's decoding has left over from its parts of the last steps; negative: overdrawn."""
        self._prompt_debt: dict[str, float] = {}  # separate, so that decoding does not wait for it

    def divide(self, ready: Sequence[RunningSession], latency: StepLatency) -> Division | None:
        """Return the division of the coming step, without side effects until `begin`. None: all sessions take part,
        because there is a single tenant or no decoding session."""
        first = ready[0].tenant if ready else ""
        if all(entry.tenant == first for entry in ready):
            return None
        tenants: dict[str, Presence] = {}
        decoders: list[RunningSession] = []
        for entry in ready:
            presence = tenants.get(entry.tenant)
            if presence is None:
                presence = tenants[entry.tenant] = Presence(entry.weight)
            if entry.session.remaining_prompt:
                presence.prompts.append(entry)
                presence.prompt_rows = min(presence.prompt_rows + entry.session.computable, self._prefill_rows)
            else:
                decoders.append(entry)
                presence.decoders.append(entry)
                presence.beside += entry.beside
        if not decoders:
            return None
        division = Division(latency, tenants, {})
        bound, least = division.bound({})
        rows = len(decoders) + sum(presence.prompt_rows for presence in tenants.values())
        division.used = latency.of(rows) + sum(presence.beside for presence in tenants.values())
        if self._may_measure(tenants[least]):
            self._measure(division, bound, least)
        # All rows fit in the bound: no tenant is slowed beyond its part.
        elif division.used <= bound * (1 + TOLERANCE):
            division.taking_part = decoders
        else:
            self._choose(division, bound, least)
        return division

    def begin(self, division: Division | None) -> None:
        """Note that the step of this division begins."""
        self._steps += 1
        self.credit, self._prompt_debt = ({}, {}) if division is None else (division.credit, division.prompt_debt)
        if division is not None:
            for entry in division.taking_part:
                entry.last_step = self._steps
            if division.measures:
                self._measurements, self._measured_at = self._measurements + 1, self._steps

    def observe_grammars(self, results: Iterable[tuple[RunningSession, VerifyResult]]) -> None:
        """Update grammar costs from a step's sessions. The difference from the expected cost is charged to the tenant's
        credit."""
        for entry, _ in results:
            session = entry.session
            if session.grammar is None:
                continue
            seconds, session.grammar_seconds = session.grammar_seconds, 0.0
            self._pay(entry, seconds - entry.usual_grammar_seconds)
            entry.usual_grammar_seconds = _average(entry.usual_grammar_seconds, seconds)
            self._usual[entry.tenant] = _average(self._usual.pop(entry.tenant, 0.0), seconds)  # now the latest
            if len(self._usual) > REMEMBERED:
                self._usual.popitem(last=False)

    def observe_proposers(self, seconds: Mapping[RunningSession, float]) -> None:
        """Update the seconds taken by proposers before a step, for each session decoding in it."""
        for entry, taken in seconds.items():
            if taken:
                self._pay(entry, taken - entry.usual_proposer_seconds)
            entry.usual_proposer_seconds = _average(entry.usual_proposer_seconds, taken) if taken else 0.0

    def _pay(self, entry: RunningSession, seconds: float) -> None:
        """Charge a session's unexpected cost, which may be negative, to its tenant's credit."""
        if entry.tenant in self.credit:
            self.credit[entry.tenant] -= seconds

    def charge(self, tenant: str, seconds: float) -> None:
        """Charge a tenant's prompts for exceeding their part; an unused part of prompts is lost."""
        if seconds > 0:
            self._prompt_debt[tenant] = self._prompt_debt.get(tenant, 0.0) + seconds

    def joined(self, entry: RunningSession) -> None:
        """Initialise a new session's grammar cost with its tenant's usual one."""
        if entry.session.grammar is not None:
            entry.usual_grammar_seconds = self._usual.get(entry.tenant, 0.0)

    def _may_measure(self, presence: Presence) -> bool:
        """Return whether the coming step should measure a tenant's rows alone."""
        every = MEASURED_EVERY if self._measurements < MEASURED_FIRST else MEASURED_LATER
        return bool(presence.decoders) and not presence.prompts and self._steps + 1 - self._measured_at >= every

    def _measure(self, division: Division, bound: float, least: str) -> None:
        """Give the step to the rows of one tenant alone, keeping the other tenants' credit and debt."""
        division.measures, division.used = True, bound
        division.credit, division.prompt_debt = dict(self.credit), dict(self._prompt_debt)
        for tenant, presence in division.tenants.items():
            if tenant == least:
                division.taking_part = presence.decoders
            else:
                division.sitting_out += presence.decoders

    def _choose(self, division: Division, bound: float, least: str) -> None:
        """Choose the sessions of a step that would exceed its bound with all sessions."""
        latency, tenants = division.latency, division.tenants
        division.used = bound
        taken = division.taking_part
        taken += tenants[least].decoders
        beside, begin = tenants[least].prompt_rows, tenants[least].rows
        wanted = {
            tenant: latency.of(begin + presence.rows)
            - latency.of(begin)
            + presence.beside
            - self.credit.get(tenant, 0.0)
            for tenant, presence in tenants.items()
            if tenant != least
        }
        # The bounding tenant's rows are in the step in any case; the others divide the rest of the bound.
        budget = SharedBudget(bound - division.alone(least), {tenant: tenants[tenant].weight for tenant in wanted})
        for tenant in budget.order(wanted):
            presence, part = tenants[tenant], budget.part(tenant)
            count = len(presence.prompts) + len(presence.decoders)
            # A tenant's decoding and prompts divide its part in proportion to their sessions.
            of_texts = part * len(presence.decoders) / count
            of_prompts = part - of_texts - self._prompt_debt.get(tenant, 0.0)
            left, waiting = _take(presence.decoders, of_texts + self.credit.get(tenant, 0.0), taken, beside, latency)
            division.sitting_out += waiting
            if wanted[tenant] <= part and not waiting:
                division.credit[tenant] = 0.0  # fully served: no credit to carry over
                # Rows may cost more after other tenants' rows than estimated in `wanted`.
                budget.take(tenant, max(0.0, wanted[tenant], of_texts - left))
                continue
            # Credit only for sessions that wait (deficit round robin also resets an empty queue). An overdraft stays,
            # but prompts repay it below: `charge` then carries over what is left of it.
            division.credit[tenant] = left if waiting else 0.0 if presence.prompts else min(0.0, left)
            if presence.prompts:
                # Seconds not used by decoding go to the tenant's prompts, unless they are credit for sessions that
                # wait.
                division.prompt_seconds[tenant] = of_prompts if waiting else of_prompts + left
            budget.take(tenant, part)


def _average(before: float, latest: float) -> float:
    """Return a moving average of seconds, starting at the first value."""
    return before + BESIDE_SMOOTHING * (latest - before) if before else latest


def _take(
    waiting: Sequence[RunningSession],
    seconds: float,
    taken: list[RunningSession],
    beside: int,
    latency: StepLatency,
) -> tuple[float, list[RunningSession]]:
    """Add sessions to `taken`, in a step with `beside` rows of prompts: longest waiting first, while their cost fits in
    `seconds`. Return the seconds left, and the sessions that sit out."""
    queue = [(entry.last_step, entry.arrival, entry) for entry in waiting]
    heapq.heapify(queue)
    while queue:
        rows = beside + len(taken)
        cost = latency.of(rows + 1) - latency.of(rows) + queue[0][2].beside
        # Stop at the first that does not fit: skipping it for a cheaper one would starve it.
        if cost > seconds * (1 + TOLERANCE):
            break
        seconds -= cost
        taken.append(heapq.heappop(queue)[2])
    return seconds, [entry for _, _, entry in queue]
