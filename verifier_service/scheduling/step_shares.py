"""Shares of a step: which sessions take part in it, and how long rows of each tenant may make it.

A step takes as long as all its rows together, and every session in it waits for all of them. So a tenant that brings
many rows slows a text of one that brings few, whatever turns they take at memory. Processor sharing (Kleinrock 1967)
would give each of the tenants present a machine of its own that is W / w times as slow, where w is its weight and W the
sum of all weights. A step keeps that promise to every tenant if it takes at most

    B = min over tenants i of  (W / w_i) * A_i,      A_i = T_v(rows of i) + what they cost besides

since A_i is what the step would take with the rows of i alone. Besides rows cost grammars and proposers. The tenant v
at which the minimum is taken has all its rows in the step. The others divide what is left, B - A_v = (sum of their
weights / w_v) * A_v, by their weights, and what one does not want of its part goes to the others (max-min). Each takes
in its sessions in turn, those first that have waited longest, while their cost fits; the rest sit the step out. What is
left of a tenant's part is its credit in the next step (deficit round robin, Shreedhar and Varghese 1995), so a session
whose rows cost more than a whole part takes part every few steps. None starves, and the promise holds on average, up to
one such session.

The same holds for what goes beyond roots: candidates, lookahead windows and chunks of prompts have what the tenant's
roots leave of its part. Where further rows are free, or only one tenant is present, nobody sits out.

The bound is as good as what is known of A_v, and while tenants share steps, no step has the rows of v alone. So now and
then a step has only these, to measure A_v.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from specdec.serving.max_min import Pool
from verifier_service.backend.result import VerifyResult
from verifier_service.costs.step_latency import StepLatency
from verifier_service.sessions.running_session import RunningSession

TOLERANCE = 1e-9
"""Relative error of sums of seconds."""

BESIDE_SMOOTHING = 0.2
"""Weight of the latest step in the moving average of what a session costs besides rows."""

MEASURED_FIRST, MEASURED_EVERY, MEASURED_LATER = 2, 4, 64
"""A tenant's rows alone are measured twice at first, four steps apart, and then in every 64th step: the others lose a
sixty-fourth of their part. More at first would distort what is learned of drafts."""

REMEMBERED = 1024
"""Tenants for which it is kept what a grammar usually costs, and how often their rows were measured."""


@dataclass
class Presence:
    """A tenant in a step: its sessions that are ready, and what they would cost alone."""

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
    credit: dict[str, float]  # seconds that each tenant's texts have for the next step
    prompt_debt: dict[str, float] = field(default_factory=dict)  # seconds that its prompts have had too much
    taking_part: list[RunningSession] = field(default_factory=list)  # that decode
    sitting_out: list[RunningSession] = field(default_factory=list)
    prompt_seconds: dict[str, float] = field(default_factory=dict)
    """How long chunks of its prompts may make the step, by tenant; tenants without an entry are not limited."""

    used: float = 0.0  # seconds of the step that roots and prompts have, or that tenants keep as credit
    measures: bool = False  # what one tenant's rows take alone

    def alone(self, tenant: str, extra: int = 0) -> float:
        """Return the seconds of a step with the rows of one tenant, `extra` candidates included."""
        presence = self.tenants[tenant]
        return self.latency.of(presence.rows + extra) + presence.beside

    def bound(self, extra: Mapping[str, int]) -> tuple[float, str]:
        """Return how long the step may take, and the tenant that sets this bound; `extra`: the candidates that each
        tenant would have alone."""
        total = sum(presence.weight for presence in self.tenants.values())
        slowed = {
            tenant: total / presence.weight * self.alone(tenant, extra.get(tenant, 0))
            for tenant, presence in self.tenants.items()
        }
        least = min(slowed, key=slowed.__getitem__)
        return slowed[least], least

    def is_fair(self, rows: int, got: Mapping[str, float], wanted: Mapping[str, tuple[int, float]]) -> bool:
        """Return whether every tenant gets tokens at its part of the rate that it has alone, if the step has `rows`
        candidates and brings it the tokens `got`; `wanted`: its candidates and tokens in a step of its own. Tenants
        that are not in these have no candidates.

        Tokens are what the bound is for: candidates that are chosen for all sessions together may break it, and bring
        more to everybody."""
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

    def candidates(self, extra: Mapping[str, int]) -> dict[str, int]:
        """Return how many candidates each tenant may have, where it would have `extra` ones alone. Tenants with
        sessions that sit out have none: their part becomes credit, since roots bring more."""
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
        pool = Pool(left, {tenant: self.tenants[tenant].weight for tenant in wanted})
        for tenant in pool.order(wanted):
            part = pool.part(tenant)
            if tenant in held_up:
                self.credit[tenant] = self.credit.get(tenant, 0.0) + part
                found[tenant] = 0
                pool.take(tenant, part)
            else:
                found[tenant] = min(extra.get(tenant, 0), self.latency.rows_within(self.latency.of(rows) + part) - rows)
                pool.take(tenant, self._slower_by(rows, found[tenant]))
                rows += found[tenant]
        return found

    def _slower_by(self, rows: int, more: int) -> float:
        """Return by how much `more` rows make a step over `rows` rows longer."""
        return self.latency.of(rows + more) - self.latency.of(rows)


class StepShares:
    """Divides steps among tenants. Belongs to the step loop's thread."""

    def __init__(self, prefill_rows: int) -> None:
        """`prefill_rows`: most rows of prompts in a step."""
        self._prefill_rows = prefill_rows
        self._steps = 0
        self._measured: OrderedDict[str, tuple[int, int]] = OrderedDict()  # tenant: how often, and in which step last
        self._usual: OrderedDict[str, float] = OrderedDict()  # seconds that a grammar costs in a step, by tenant
        self.credit: dict[str, float] = {}
        """Seconds that a tenant's texts have left of its parts of the last steps, or have had too much (negative)."""
        self._prompt_debt: dict[str, float] = {}  # apart: texts do not wait for what their tenant's prompts owe

    def divide(self, ready: Sequence[RunningSession], latency: StepLatency) -> Division | None:
        """Return who takes part in the coming step, which changes nothing until `begin`. None: all do, since only one
        tenant is there, or no text waits."""
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
        if self._is_due(least, tenants[least]):
            self._measure(division, bound, least)
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
                tenant = division.taking_part[0].tenant
                times, _ = self._measured.pop(tenant, (0, 0))
                self._measured[tenant] = times + 1, self._steps
                if len(self._measured) > REMEMBERED:
                    self._measured.popitem(last=False)

    def observe_grammars(self, results: Iterable[tuple[RunningSession, VerifyResult]]) -> None:
        """Learn what the grammars of a step's sessions have cost. What one took beyond what was expected, its tenant
        pays for in the next steps."""
        for entry, _ in results:
            session = entry.session
            if session.grammar is None:
                continue
            seconds, session.grammar_seconds = session.grammar_seconds, 0.0
            self._pay(entry, seconds - entry.grammar)
            entry.grammar = _average(entry.grammar, seconds)
            self._usual[entry.tenant] = _average(self._usual.get(entry.tenant, 0.0), seconds)
            if len(self._usual) > REMEMBERED:
                self._usual.popitem(last=False)

    def observe_proposers(self, seconds: Mapping[RunningSession, float]) -> None:
        """Learn how many seconds proposers have taken before a step for each session that decodes in it."""
        for entry, taken in seconds.items():
            if taken:
                self._pay(entry, taken - entry.proposing)
            entry.proposing = _average(entry.proposing, taken) if taken else 0.0

    def _pay(self, entry: RunningSession, seconds: float) -> None:
        """Take what a session has cost beyond what was expected out of its tenant's credit."""
        if entry.tenant in self.credit:
            self.credit[entry.tenant] -= seconds

    def charge(self, tenant: str, seconds: float) -> None:
        """Have a tenant's prompts pay for what their chunks take beyond their part; what they leave is lost."""
        if seconds > 0:
            self._prompt_debt[tenant] = self._prompt_debt.get(tenant, 0.0) + seconds

    def joined(self, entry: RunningSession) -> None:
        """Assume of a session that comes what its tenant's grammars usually cost."""
        if entry.session.grammar is not None:
            entry.grammar = self._usual.get(entry.tenant, 0.0)

    def _is_due(self, tenant: str, presence: Presence) -> bool:
        """Return whether the coming step is to measure what this tenant's rows take alone."""
        if not presence.decoders or presence.prompts:
            return False
        times, last = self._measured.get(tenant, (0, self._steps + 1 - MEASURED_EVERY))
        return self._steps + 1 - last >= (MEASURED_EVERY if times < MEASURED_FIRST else MEASURED_LATER)

    def _measure(self, division: Division, bound: float, least: str) -> None:
        """Have the step take the rows of one tenant alone. What the others have or owe stays as it is."""
        division.measures, division.used = True, bound
        division.credit, division.prompt_debt = dict(self.credit), dict(self._prompt_debt)
        for tenant, presence in division.tenants.items():
            if tenant == least:
                division.taking_part = presence.decoders
            else:
                division.sitting_out += presence.decoders

    def _choose(self, division: Division, bound: float, least: str) -> None:
        """Choose the sessions for a step that would be longer than its bound with all of them."""
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
        pool = Pool(bound - division.alone(least), {tenant: tenants[tenant].weight for tenant in wanted})
        for tenant in pool.order(wanted):
            presence, part = tenants[tenant], pool.part(tenant)
            count = len(presence.prompts) + len(presence.decoders)
            of_texts = part * len(presence.decoders) / count
            of_prompts = part - of_texts - self._prompt_debt.get(tenant, 0.0)
            left, waiting = _take(presence.decoders, of_texts + self.credit.get(tenant, 0.0), taken, beside, latency)
            division.sitting_out += waiting
            if wanted[tenant] <= part and not waiting:
                division.credit[tenant] = 0.0  # it has all that it wants, and saves nothing up
                # Rows may cost more behind those of tenants before it than they were wanted for.
                pool.take(tenant, max(0.0, wanted[tenant], of_texts - left))
                continue
            division.credit[tenant] = left if waiting else min(0.0, left)
            if presence.prompts:
                division.prompt_seconds[tenant] = of_prompts if waiting else of_prompts + left
            pool.take(tenant, part)


def _average(before: float, latest: float) -> float:
    """Return a moving average of seconds; the first one is taken as it is."""
    return before + BESIDE_SMOOTHING * (latest - before) if before else latest


def _take(
    waiting: Sequence[RunningSession],
    seconds: float,
    taken: list[RunningSession],
    beside: int,
    latency: StepLatency,
) -> tuple[float, list[RunningSession]]:
    """Add sessions to those that are `taken` into a step with `beside` rows of prompts, those first that have waited
    longest, while their cost fits in `seconds`. Return the seconds that are left, and who sits out."""
    queue = [(entry.last_step, entry.arrival, entry) for entry in waiting]
    heapq.heapify(queue)
    while queue:
        rows = beside + len(taken)
        cost = latency.of(rows + 1) - latency.of(rows) + queue[0][2].beside
        if cost > seconds * (1 + TOLERANCE):
            break
        seconds -= cost
        taken.append(heapq.heappop(queue)[2])
    return seconds, [entry for _, _, entry in queue]
