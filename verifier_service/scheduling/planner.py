"""The plan of a step: the rows of each session in it.

Steps over n rows take T_v(n) seconds (`StepLatency`), or s * T_v(n) with rows of prompts (`PrefillSlowdown`). The plan
is made in this order:

- Yielding: decoding sessions sit out while urgent prompts of other tenants are computed (`TenantShares.urgent`), if
  that makes the step shorter by more than a factor: T_v(p + d) > worth_a_wait * T_v(p + d'), with p urgent prompt rows,
  d decoding sessions, and d' of them that do not yield. This happens in at most `most_waiting_steps` steps in a row.
- Speculation: candidates of all sessions together, for the highest goodput (`token_budget.py`), and the best candidate
  of each session that is forced to speculate, even at a loss. If a tenant would get less than its part of its goodput
  alone (`Division.is_fair`), every tenant's candidates are chosen apart, within its part of the step.
- Prompts: chunks fill the rest of the step (`prefill.py`). c tokens of a tenant with t seconds left in its part fit
  beside r rows if s * (T_v(r + c) - T_v(r)) <= t. Rows of prompts with log-probabilities have logits: all of these and
  the candidates together are at most `MAX_STEP_CANDIDATES`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from dataclasses import dataclass, replace

import structlog

from specdec.decoding.tree import Node
from specdec.engine.batch import PackedBatch, Packer
from specdec.engine.kv.slots import Slots
from specdec.engine.working_memory import MAX_STEP_CANDIDATES
from verifier_service.backend.result import VerifyResult, Without
from verifier_service.costs.token_budget import select_candidates
from verifier_service.proposers.ngrams import open_windows, window_rows
from verifier_service.scheduling.cpu_threads import ThreadPolicy
from verifier_service.scheduling.foreseen_step import ForeseenStep
from verifier_service.scheduling.prefill import PrefillSlowdown, prefill_chunks
from verifier_service.scheduling.run_queue import RunQueue
from verifier_service.scheduling.shares import Urgent, prompt_weights
from verifier_service.scheduling.step_shares import Division, StepShares
from verifier_service.sessions.ngram import LookaheadRows
from verifier_service.sessions.running_session import RunningSession
from verifier_service.sessions.session import VerifierSession
from verifier_service.sessions.step_rows import ScheduledRows
from verifier_service.settings.tuning import Tuning
from verifier_service.speculation.eligibility import Eligibility

log = structlog.get_logger()


@dataclass(frozen=True)
class StepPlan:
    """A batch, and the rows of each session in it."""

    pack: Callable[[], PackedBatch]
    written: Sequence[int] | Slots  # KV slots written by the step
    entries: list[tuple[RunningSession, ScheduledRows]]
    rows: int  # without padding
    expected: float  # seconds
    sitting_out: list[RunningSession]  # decoding sessions without rows in it
    division: Division | None = None  # None: not divided among tenants

    @property
    def decodes_only(self) -> bool:
        """True if the step computes nothing of a prompt, not even its end."""
        return all(rows.root_row is not None and rows.count == 1 for _, rows in self.entries)


@dataclass
class Alone:
    """The candidates of a tenant in a step of its own."""

    places: list[int]  # of its sessions among the speculating ones
    roots: int
    nodes: list[list[Node]]
    break_even: float
    rows: int = 0  # of lookahead windows

    @property
    def count(self) -> int:
        return sum(map(len, self.nodes))


class Planner:
    """Fills steps: roots of decoding sessions, candidates worth their rows, lookahead windows, chunks of prompts.

    `packer` makes an empty batch; `tree_slots` hold side branches of token trees. Limits on rows: `step_rows` for
    prompts beside decoding sessions, within the time limit of chunked prefill; `prefill_rows` for prompts alone.
    """

    def __init__(
        self,
        packer: Callable[[], Packer],
        queue: RunQueue,
        threads: ThreadPolicy,
        eligibility: Eligibility,
        tree_slots: Sequence[int],
        step_rows: int,
        prefill_rows: int,
        tuning: Tuning,
    ) -> None:
        self._tuning = tuning
        self._packer = packer
        self._queue = queue
        self._foreseen = ForeseenStep(queue)
        self._certain = False  # the foreseen step is the next one, whatever is chosen
        self._division: Division | None = None  # of the foreseen step
        self._threads = threads
        self._eligibility = eligibility
        self._tree_slots = tree_slots
        self._step_rows = step_rows
        self._prefill_rows = prefill_rows
        self._prefill_slowdown = PrefillSlowdown(tuning.prefill)
        self.shares = StepShares(prefill_rows)
        self._waited = 0  # consecutive steps with urgent prompts before decoding

    def plan(self, ready: Sequence[RunningSession], spent: float, division: Division | None = None) -> StepPlan:
        """Plan a step. Sessions that yield to urgent prompts are left out. `spent`: seconds the proposers took for
        these sessions; `division`: the one that chose `ready`; None with a single tenant."""
        self.shares.begin(division)
        prompts, plain, speculating = self._sorted(ready)
        decoders = [*plain, *speculating]
        waiting = [] if division is None else division.sitting_out
        urgent = self._queue.shares.urgent(prompts, [*decoders, *waiting])
        # Bounded: a stream of new tenants must not starve decoding.
        goes_first = bool(urgent.tenants) and self._waited < self._tuning.prefill.most_waiting_steps
        if decoders:
            self._waited = self._waited + 1 if goes_first else 0
        sitting_out = list(waiting)
        if goes_first and self._give_way(prompts, urgent, decoders):
            sitting_out += [entry for entry in decoders if entry.tenant in urgent.yielding]
            prompts = [entry for entry in prompts if entry.tenant in urgent.tenants]
            plain, speculating = (
                [entry for entry in entries if entry.tenant not in urgent.yielding] for entries in (plain, speculating)
            )
        # To measure one tenant's rows alone, other tenants' prompts stay out, unless they are urgent.
        if division is not None and division.measures:
            prompts = [entry for entry in prompts if entry.tenant in urgent.tenants]
        decoding, latency = len(plain) + len(speculating), self._threads.latency
        chosen, windows, break_even = self._speculate(speculating, decoding, spent, division, may_explore=not prompts)
        if decoding:
            self._eligibility.observe_break_even(break_even, self._tuning.break_even_smoothing)
        for entry in (*plain, *prompts):
            entry.session.ngrams.close_window()
        pack: Callable[[], PackedBatch]
        written: Sequence[int] | Slots
        foreseen = self._foreseen.take([*speculating, *plain])
        # The foreseen batch has one row a text: usable only if nothing else has joined the step.
        if foreseen is not None and not (prompts or any(chosen) or any(windows)):
            batch, entries = foreseen
            pack, written, taken = lambda: batch, batch.slots, len(entries)
        else:
            packer = self._packer()
            entries = self._schedule(packer, zip(speculating, chosen, windows, strict=True), plain)
            chunks = self._chunks(prompts, urgent.tenants, goes_first, decoding, len(packer.tokens))
            chunks = self._with_room_for_scores(chunks, len(packer.wanted) - decoding)
            if division is not None:
                chunks = self._within_parts(chunks, division, urgent.tenants if goes_first else (), len(packer.tokens))
            entries += [(entry, entry.session.plan(packer, chunk, [], [])) for entry, chunk in chunks]
            pack, written, taken = packer.pack, packer.slots, len(packer.tokens)
        for entry, rows in entries[: len(speculating)]:
            rows.undrafted = self._eligibility.lacks_remote_draft(entry.session)
            rows.drafted = not rows.undrafted and self._eligibility.uses_remote_draft(entry.session)
        self._explain(entries, len(speculating), decoding, taken, break_even)
        expected = latency.of(taken) + sum(entry.grammar for entry, _ in entries)
        plan = StepPlan(pack, written, entries, taken, expected, sitting_out, division)
        return plan if plan.decodes_only else replace(plan, expected=plan.expected * self._prefill_slowdown.factor)

    def prepare(self, plan: StepPlan) -> None:
        """Pack the next step, as far as it can be foreseen."""
        self._certain = False
        try:
            self._foreseen.prepare(self._packer(), plan.entries)
            # Asked here, while the device computes, and not when the tokens are known and the device idles.
            self._certain = self._continues(plan)
        except Exception as error:  # must not fail the pass in progress
            log.error("next_step_not_packed", exc_info=error)
            self._foreseen.forget()

    def plan_early(self, results: Sequence[tuple[RunningSession, VerifyResult]]) -> StepPlan | None:
        """Return the plan of the next step before the current one's `results` are committed; None if it depends on
        more."""
        foreseen = self._foreseen.take_early(results) if self._certain else None
        if foreseen is None:
            return None
        batch, entries, rows = foreseen
        expected = self._threads.latency.of(rows) + sum(entry.grammar for entry, _ in entries)
        return StepPlan(lambda: batch, batch.slots, entries, rows, expected, [], self._division)

    def begin_early(self, plan: StepPlan) -> StepPlan:
        """Begin a step of `plan_early`, once the step before it is committed. Return its plan without the sessions that
        have left since."""
        entries = [(entry, rows) for entry, rows in plan.entries if entry.session.table is not None]
        self.shares.begin(plan.division)
        self._waited = 0
        break_even = select_candidates([], self._threads.latency, plan.rows, 0, explore=True).break_even
        self._eligibility.observe_break_even(break_even, self._tuning.break_even_smoothing)
        self._explain(entries, 0, len(entries), plan.rows, break_even)
        return replace(plan, entries=entries)

    def idle(self) -> None:
        """Note that no step follows: release what is kept of ended sessions."""
        self._foreseen.forget()

    def _continues(self, plan: StepPlan) -> bool:
        """Return whether the step after this one follows from its tokens alone: it has all sessions, none may have or
        need candidates, no reader is about to fall too far behind, and no tenant gives way to another."""
        entries, eligibility = [entry for entry, _ in plan.entries], self._eligibility
        self._division = self.shares.divide(entries, self._threads.latency)
        if self._division is not None and not (plan.decodes_only and self._division.takes_all):
            return False
        return self._queue.consists_of(entries) and not any(
            entry.session.needs_draft
            or eligibility.uses_remote_draft(entry.session)
            or eligibility.uses_proposers(entry.session)
            or self._queue.throttled(entry, ahead=1)
            for entry in entries
        )

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Update the latency model with a step's duration. T_v is that of short texts: steps with prompts update the
        slowdown instead, since rows of long prompts cost more.

        A step launched early lasts from its launch. Where the host takes longer than the device, the host's time
        counts: it is the time between two tokens.
        """
        if plan.decodes_only:
            self._threads.observe(plan.rows, seconds)
        else:
            self._prefill_slowdown.observe(self._threads.latency.of(plan.rows), seconds)

    def _explain(
        self,
        entries: Sequence[tuple[RunningSession, ScheduledRows]],
        speculating: int,
        decoding: int,
        taken: int,
        break_even: float,
    ) -> None:
        """Record the decision on each session's candidates in its rows. The first `speculating` of the `decoding` ones
        could have some; the step has `taken` rows."""
        eligibility, row = self._eligibility, 0.0
        for place, (entry, rows) in enumerate(entries):
            session = entry.session
            if rows.root_row is None:
                continue
            if rows.tree is not None:
                rows.decision = eligibility.decision(session)
            elif place >= decoding:
                rows.decision = eligibility.decision(session, Without.PROMPT)
            elif place < speculating and not session.candidates().nodes:
                rows.decision = eligibility.decision(session, eligibility.why_nothing(session))
            elif place >= speculating and (why := eligibility.why_plain(session)) is not Without.ROW_COST:
                rows.decision = eligibility.decision(session, why)
            else:
                row = row or self._threads.latency.of(taken + 1) - self._threads.latency.of(taken)
                rows.decision = eligibility.row_cost(session, row, break_even)

    def _schedule(
        self,
        packer: Packer,
        speculating: Iterable[tuple[RunningSession, list[Node], LookaheadRows | None]],
        plain: Sequence[RunningSession],
    ) -> list[tuple[RunningSession, ScheduledRows]]:
        """Add the rows of decoding sessions, with their candidates and windows."""
        tree_slots, entries = list(self._tree_slots), []
        for entry, nodes, window in speculating:
            if nodes:
                self._queue.reserve_ahead(entry.session, 1 + max(node.position for node in nodes))
            entries.append((entry, entry.session.plan(packer, 1, nodes, tree_slots, window)))
        return entries + [(entry, entry.session.plan(packer, 1, [], tree_slots)) for entry in plain]

    def _speculate(
        self,
        speculating: Sequence[RunningSession],
        decoding: int,
        spent: float,
        division: Division | None,
        *,
        may_explore: bool,
    ) -> tuple[list[list[Node]], list[LookaheadRows | None], float]:
        """Choose candidates and open windows for sessions in a step of `decoding` ones. Return both, and the break-even
        probability.

        Candidates are chosen for all sessions together, for the highest goodput. If a tenant would get less than its
        part of what it gets alone, each tenant gets the candidates it would have alone, within its part. Only a step of
        one tenant `may_explore` the cost of rows: no prompt and no other tenant may wait for an experiment.
        """
        latency, eligibility, free = self._threads.latency, self._eligibility, len(self._tree_slots)
        sessions = [entry.session for entry in speculating]
        if division is None or not sessions:
            found = select_candidates(
                [session.candidates() for session in sessions],
                latency,
                decoding,
                free,
                spent,
                explore=decoding > 0 and may_explore,
            )
            if found.exploring is not None:
                latency.explore(found.exploring)
            _insist(sessions, found.nodes, free)
            free -= sum(map(len, found.nodes))
            # One experiment a step: with two, their costs could not be told apart.
            may_explore = may_explore and found.exploring is None
            opened = open_windows(sessions, found.nodes, decoding, free, latency, eligibility, may_explore=may_explore)
            return found.nodes, opened, found.break_even
        offers = [session.candidates() for session in sessions]
        together = select_candidates(offers, latency, decoding, free, spent)
        chosen = together.nodes
        _insist(sessions, chosen, free)
        own: dict[str, Alone] = {}
        for tenant, places in _places(speculating).items():
            roots = len(division.tenants[tenant].decoders)
            found = select_candidates([offers[i] for i in places], latency, roots, free, spent)
            some = [sessions[i] for i in places]
            _insist(some, found.nodes, free)
            own[tenant] = alone = Alone(places, roots, found.nodes, found.break_even)
            alone.rows = window_rows(some, alone.nodes, roots, free - alone.count, latency, eligibility)
        windowed = sum(alone.rows for alone in own.values())
        rows = sum(map(len, chosen)) + windowed
        got = {tenant: alone.roots + sum(_tokens(chosen[i]) for i in alone.places) for tenant, alone in own.items()}
        wanted = {
            tenant: (alone.count + alone.rows, alone.roots + sum(map(_tokens, alone.nodes)))
            for tenant, alone in own.items()
        }
        # The joint choice has the highest total goodput: keep it where no tenant pays for it.
        if division.is_fair(rows, got, wanted):
            free = min(free - sum(map(len, chosen)), windowed)
            return chosen, open_windows(sessions, chosen, decoding, free, latency, eligibility), together.break_even
        allowed = division.candidates({tenant: extra for tenant, (extra, _) in wanted.items()})
        windows: list[LookaheadRows | None] = [None] * len(sessions)
        for tenant, alone in own.items():
            most, some, roots = min(free, allowed[tenant]), [sessions[i] for i in alone.places], alone.roots
            nodes = alone.nodes
            # Fewer than it would have alone: choose the best of them again.
            if most < alone.count:
                nodes = select_candidates([offers[i] for i in alone.places], latency, roots, most, spent).nodes
            _insist(some, nodes, most)
            count = sum(map(len, nodes))
            opened = open_windows(some, nodes, roots, most - count, latency, eligibility)
            free -= count + sum(len(window.nodes) for window in opened if window is not None)
            for i, of_session, window in zip(alone.places, nodes, opened, strict=True):
                chosen[i], windows[i] = of_session, window
        return chosen, windows, min(alone.break_even for alone in own.values())

    def _within_parts(
        self, chunks: Sequence[tuple[RunningSession, int]], division: Division, urgent: Collection[str], rows: int
    ) -> list[tuple[RunningSession, int]]:
        """Cut the chunks of prompts to their tenants' parts of the step, beside `rows` rows; chunks of `urgent` tenants
        stay whole."""
        kept: list[tuple[RunningSession, int]] = []
        latency = self._threads.latency
        of_tenant: defaultdict[str, list[tuple[RunningSession, int]]] = defaultdict(list)
        for entry, chunk in chunks:
            of_tenant[entry.tenant].append((entry, chunk))
        for tenant, own in of_tenant.items():
            seconds = division.prompt_seconds.get(tenant)
            count = sum(chunk for _, chunk in own)
            if seconds is not None and tenant not in urgent:
                # The part is in seconds of this step, T_v in seconds of short texts: divide by the slowdown.
                begin = latency.of(rows)
                fitting = latency.rows_within(begin + seconds / self._prefill_slowdown.factor) - rows
                least = self._tuning.prefill.min_chunk_tokens if seconds > 0 else 0  # the next steps are charged
                most = max(fitting, least)
                if count > most:
                    own = _cut(own, most)
                    count = sum(chunk for _, chunk in own)
                self.shares.charge(tenant, (latency.of(rows + count) - begin) * self._prefill_slowdown.factor - seconds)
            rows += count
            kept += own
        return kept

    def _with_room_for_scores(
        self, chunks: list[tuple[RunningSession, int]], candidates: int
    ) -> list[tuple[RunningSession, int]]:
        """Cut the chunks of prompts with log-probabilities to the memory for logits left by the step's candidates: all
        their rows have logits."""
        scored = [(entry, chunk) for entry, chunk in chunks if entry.session.scores_prompt]
        most = max(self._tuning.prefill.min_chunk_tokens, MAX_STEP_CANDIDATES - candidates)
        if sum(chunk for _, chunk in scored) <= most:
            return chunks
        return [(entry, chunk) for entry, chunk in chunks if not entry.session.scores_prompt] + _cut(scored, most)

    def _chunks(
        self, prompts: Sequence[RunningSession], urgent: Set[str], goes_first: bool, decoding: int, rows: int
    ) -> list[tuple[RunningSession, int]]:
        """Return the tokens of each prompt to compute beside `rows` rows of `decoding` sessions. Prompts of `urgent`
        tenants come before others; with `goes_first` they are not chunked for those sessions' latency."""
        first = [entry for entry in prompts if entry.tenant in urgent]
        others = [entry for entry in prompts if entry.tenant not in urgent]
        latency, tuning = self._threads.latency, self._tuning.prefill

        def chunks(of: Sequence[RunningSession], waiting: int, most: int, urgent_rows: int = 0) -> list[int]:
            remaining, slowdown = [entry.session.computable for entry in of], self._prefill_slowdown.factor
            weights = prompt_weights(of)
            return prefill_chunks(remaining, waiting, latency, rows, most, slowdown, tuning, weights, urgent_rows)

        most = self._step_rows if decoding else self._prefill_rows
        if goes_first:
            ahead = chunks(first, 0, max(tuning.min_chunk_tokens, self._prefill_rows - rows))
        else:
            ahead = chunks(first, decoding, most)
        rest = chunks(others, decoding, most, sum(ahead))
        return [*zip(first, ahead, strict=True), *zip(others, rest, strict=True)]

    def _give_way(self, prompts: Sequence[RunningSession], urgent: Urgent, decoding: Sequence[RunningSession]) -> bool:
        """Return whether sessions yielding to `urgent` prompts sit out this step: only if it gets notably shorter."""
        # In the flat region of T_v decoding sessions hardly delay the prompts, and sitting out would gain nothing.
        rows = sum(entry.session.computable for entry in prompts if entry.tenant in urgent.tenants)
        if not rows:
            return False
        staying = sum(entry.tenant not in urgent.yielding for entry in decoding)
        rows = min(rows, self._prefill_rows)
        latency = self._threads.latency
        return latency.of(rows + len(decoding)) > self._tuning.prefill.worth_a_wait * latency.of(rows + staying)

    def _sorted(self, ready: Sequence[RunningSession]) -> tuple[list[RunningSession], ...]:
        """Split sessions into those in prefill, those decoding without candidates, and those that may have some."""
        prompts: list[RunningSession] = []
        plain: list[RunningSession] = []
        speculating: list[RunningSession] = []
        for entry in ready:
            session = entry.session
            if session.remaining_prompt:
                prompts.append(entry)
            elif self._eligibility.uses_remote_draft(session) or self._eligibility.uses_proposers(session):
                speculating.append(entry)
            else:
                plain.append(entry)
        return prompts, plain, speculating


def _insist(sessions: Sequence[VerifierSession], chosen: list[list[Node]], most: int) -> None:
    """Add the best candidate of each session that is forced to speculate and got none, as long as there are at most
    `most` in all."""
    left = most - sum(map(len, chosen))
    for place, session in enumerate(sessions):
        if left > 0 and session.policy.forced and not chosen[place] and (best := session.candidates().nodes):
            chosen[place] = best[:1]
            left -= 1


def _places(entries: Sequence[RunningSession]) -> dict[str, list[int]]:
    """Return the indices of each tenant's sessions."""
    found: defaultdict[str, list[int]] = defaultdict(list)
    for place, entry in enumerate(entries):
        found[entry.tenant].append(place)
    return found


def _tokens(nodes: Sequence[Node]) -> float:
    """Return the expected number of accepted candidates."""
    return sum(math.exp(node.path_logprob()) for node in nodes)


def _cut(chunks: Sequence[tuple[RunningSession, int]], most: int) -> list[tuple[RunningSession, int]]:
    """Return chunks cut to `most` tokens in total, in proportion, rounded in favour of the first ones."""
    left, cut = sum(chunk for _, chunk in chunks), []
    for entry, chunk in chunks:
        own = math.ceil(most * chunk / left) if left else 0
        most, left = most - own, left - chunk
        if own:
            cut.append((entry, own))
    return cut
