"""The plan of a step: the rows of each session in it.

A step over n rows takes T_v(n) seconds (`StepLatency`), times a factor if it has rows of prompts (`PrefillSlowdown`).
The plan is made in this order:

1. Decoding sessions yield to urgent prompts of other tenants if that makes the step notably shorter, in at most
   `most_waiting_steps` steps in a row (`step_prompts.py`).
2. Candidates and lookahead windows are chosen for the highest goodput (`step_candidates.py`).
3. Chunks of prompts fill the rest of the step (`step_prompts.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import structlog

from specdec.decoding.tree import Node
from specdec.engine.batch import PackedBatch, Packer
from specdec.engine.kv.slots import Slots
from verifier_service.backend.result import VerifyResult, Without
from verifier_service.costs.token_budget import RowPrice, select_candidates
from verifier_service.scheduling.cpu_threads import ThreadPolicy
from verifier_service.scheduling.foreseen_step import Entries, ForeseenStep
from verifier_service.scheduling.run_queue import RunQueue
from verifier_service.scheduling.shares import Urgent
from verifier_service.scheduling.step_candidates import CandidateChoice, StepCandidates
from verifier_service.scheduling.step_prompts import StepPrompts
from verifier_service.scheduling.step_shares import Division, StepShares
from verifier_service.sessions.ngram import LookaheadRows
from verifier_service.sessions.running_session import RunningSession
from verifier_service.sessions.step_rows import ScheduledRows
from verifier_service.settings.tuning import Tuning
from verifier_service.speculation.eligibility import Eligibility

log = structlog.get_logger()


@dataclass(frozen=True)
class StepPlan:
    """A batch, and the rows of each session in it."""

    pack: Callable[[], PackedBatch]
    written: Sequence[int] | Slots  # KV slots written by the step
    entries: Entries
    rows: int  # without padding
    decodes_only: bool  # it computes nothing of a prompt, not even its end
    expected: float  # seconds
    sitting_out: list[RunningSession]  # decoding sessions without rows in it
    division: Division | None = None  # None: not divided among tenants


@dataclass(frozen=True)
class _StepSessions:
    """The sessions of a step, by their part in it."""

    prompts: list[RunningSession]
    plain: list[RunningSession]  # decoding without candidates
    speculating: list[RunningSession]  # decoding, and may have candidates
    sitting_out: list[RunningSession]  # decoding sessions without rows
    urgent: Urgent
    goes_first: bool  # the urgent prompts go before decoding sessions
    division: Division | None

    @property
    def decoding(self) -> int:
        """The number of decoding sessions with rows."""
        return len(self.plain) + len(self.speculating)


class Planner:
    """Fills steps with roots of decoding sessions, paying candidates, lookahead windows and chunks of prompts.

    `packer` makes an empty batch; `tree_slots` hold side branches of token trees; `step_rows` and `prefill_rows` limit
    rows as in `StepPrompts`.
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
        self._certain = False  # the next step is the foreseen one, whatever tokens this step chooses
        self._division: Division | None = None  # of the foreseen step
        self._threads = threads
        self._eligibility = eligibility
        self._tree_slots = tree_slots
        self.shares = StepShares(prefill_rows)
        self._prompts = StepPrompts(threads, self.shares, step_rows, prefill_rows, tuning.prefill)
        self._waited = 0  # consecutive steps in which urgent prompts went before decoding

    def plan(self, ready: Sequence[RunningSession], spent: float, division: Division | None = None) -> StepPlan:
        """Plan a step. Sessions that yield to urgent prompts are left out. `spent`: seconds the proposers took for
        these sessions; `division`: the step's division among tenants, already applied to `ready`; None: not divided."""
        self.shares.begin(division)
        sessions = self._without_yielding(ready, division)
        chosen = self._choose(sessions, spent)
        plan = self._fill(sessions, chosen)
        for entry, rows in plan.entries[: len(sessions.speculating)]:
            rows.undrafted = self._eligibility.lacks_remote_draft(entry.session)
            rows.drafted = not rows.undrafted and self._eligibility.uses_remote_draft(entry.session)
        self._explain(plan.entries, chosen, sessions.decoding, plan.rows)
        return plan

    def _without_yielding(self, ready: Sequence[RunningSession], division: Division | None) -> _StepSessions:
        """Return the sessions of the step, without those that yield to urgent prompts."""
        prompts, plain, speculating = self._sorted(ready)
        decoders = [*plain, *speculating]
        waiting = [] if division is None else division.sitting_out
        urgent = self._queue.memory_shares.urgent(prompts, [*decoders, *waiting])
        # Bounded: a stream of new tenants must not starve decoding.
        goes_first = bool(urgent.tenants) and self._waited < self._tuning.prefill.most_waiting_steps
        if decoders:
            self._waited = self._waited + 1 if goes_first else 0
        sitting_out = list(waiting)
        if goes_first and self._prompts.worth_sitting_out(prompts, urgent, decoders):
            sitting_out += [entry for entry in decoders if entry.tenant in urgent.yielding]
            prompts = [entry for entry in prompts if entry.tenant in urgent.tenants]
            plain, speculating = (
                [entry for entry in entries if entry.tenant not in urgent.yielding] for entries in (plain, speculating)
            )
        # To measure one tenant's rows alone, other tenants' prompts stay out, unless they are urgent.
        if division is not None and division.measures:
            prompts = [entry for entry in prompts if entry.tenant in urgent.tenants]
        return _StepSessions(prompts, plain, speculating, sitting_out, urgent, goes_first, division)

    def _choose(self, sessions: _StepSessions, spent: float) -> StepCandidates:
        """Choose the candidates and windows of the speculating sessions; close the windows of the others."""
        speculating, decoding, division = sessions.speculating, sessions.decoding, sessions.division
        choice = CandidateChoice(self._threads.latency, self._eligibility, spent, len(self._tree_slots))
        may_explore = not sessions.prompts
        if division is None or not speculating:
            chosen = choice.for_all([entry.session for entry in speculating], decoding, may_explore=may_explore)
        else:
            chosen = choice.by_tenant(speculating, decoding, division, may_explore=may_explore)
        if decoding:
            self._eligibility.observe_break_even(chosen.break_even, self._tuning.break_even_smoothing)
        for entry in (*sessions.plain, *sessions.prompts):
            entry.session.ngrams.close_window()
        return chosen

    def _fill(self, sessions: _StepSessions, chosen: StepCandidates) -> StepPlan:
        """Take the batch packed ahead, or fill a new one with chunks of prompts."""
        prompts, plain, speculating = sessions.prompts, sessions.plain, sessions.speculating
        sitting_out, division = sessions.sitting_out, sessions.division
        foreseen = self._foreseen.take([*speculating, *plain])
        # The foreseen batch has one row per text: usable only if nothing else has joined the step.
        if foreseen is not None and not (prompts or any(chosen.nodes) or any(chosen.windows)):
            batch, entries = foreseen
            return self._decoding(batch, entries, len(entries), sitting_out, division)
        packer, decoding = self._packer(), sessions.decoding
        entries = self._schedule(packer, zip(speculating, chosen.nodes, chosen.windows, strict=True), plain)
        chunks = self._prompts.chunks(
            prompts,
            sessions.urgent,
            decoding,
            rows=len(packer.tokens),
            candidates=len(packer.wanted) - decoding,
            division=division,
            goes_first=sessions.goes_first,
        )
        entries += [(entry, entry.session.plan(packer, chunk, [], [])) for entry, chunk in chunks]
        rows = len(packer.tokens)
        expected = self._decoding_seconds(rows, entries) * (self._prompts.slowdown.factor if chunks else 1.0)
        return StepPlan(packer.pack, packer.slots, entries, rows, not chunks, expected, sitting_out, division)

    def _decoding(
        self,
        batch: PackedBatch,
        entries: Entries,
        rows: int,
        sitting_out: list[RunningSession],
        division: Division | None,
    ) -> StepPlan:
        """Return the plan of a packed step that computes nothing of a prompt."""
        expected = self._decoding_seconds(rows, entries)
        return StepPlan(lambda: batch, batch.slots, entries, rows, True, expected, sitting_out, division)

    def _decoding_seconds(self, rows: int, entries: Entries) -> float:
        """Return the expected seconds of a step over `rows` rows, if it computes nothing of a prompt."""
        return self._threads.latency.of(rows) + sum(entry.usual_grammar_seconds for entry, _ in entries)

    def pack_next(self, plan: StepPlan) -> None:
        """Pack the next step, if it can be foreseen."""
        self._certain = False
        try:
            self._foreseen.prepare(self._packer(), plan.entries)
            # Decide now, while the device computes: when the tokens are known, the device is already idle.
            self._certain = self._continues(plan)
        except Exception as error:  # must not fail the pass in progress
            log.error("next_step_not_packed", exc_info=error)
            self._foreseen.forget()

    def plan_early(self, results: Sequence[tuple[RunningSession, VerifyResult]]) -> StepPlan | None:
        """Plan the next step before the `results` of the current one are committed. None if the plan depends on more
        than `results`."""
        foreseen = self._foreseen.take_early(results) if self._certain else None
        if foreseen is None:
            return None
        batch, entries, rows = foreseen
        return self._decoding(batch, entries, rows, [], self._division)

    def begin_early(self, plan: StepPlan) -> StepPlan:
        """Begin a step of `plan_early`, once the step before it is committed. Return its plan without the sessions that
        have left since."""
        entries = [(entry, rows) for entry, rows in plan.entries if entry.session.table is not None]
        self.shares.begin(plan.division)
        self._waited = 0
        break_even = select_candidates([], self._threads.latency, plan.rows, 0, explore=True).break_even
        self._eligibility.observe_break_even(break_even, self._tuning.break_even_smoothing)
        self._explain(entries, StepCandidates([], [], [], break_even), len(entries), plan.rows)
        return replace(plan, entries=entries)

    def idle(self) -> None:
        """Drop the foreseen step, because no step follows: it would keep ended sessions in memory."""
        self._foreseen.forget()
        self._division = None

    def _continues(self, plan: StepPlan) -> bool:
        """Return True if the next step depends only on this step's tokens: all sessions are in this step, none of them
        uses or needs a drafter or is about to be throttled, and no tenant sits out for another."""
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
        """Update the latency model with a step's duration. T_v is for short texts, and rows of long prompts cost more,
        so steps with prompts update the slowdown instead.

        A step launched early is timed from its launch. If the host is slower than the device, this measures the host's
        time, which is then the time between two tokens.
        """
        if plan.decodes_only:
            self._threads.observe(plan.rows, seconds)
        else:
            self._prompts.slowdown.observe(self._threads.latency.of(plan.rows), seconds)

    def _explain(
        self,
        entries: Sequence[tuple[RunningSession, ScheduledRows]],
        chosen: StepCandidates,
        decoding: int,
        total_rows: int,
    ) -> None:
        """Record the decision on each session's candidates in its rows. The first `decoding` entries are decoding
        sessions; those that may have candidates come first, in the order of `chosen`. `total_rows`: of the step."""
        eligibility, latency = self._eligibility, self._threads.latency
        for place, (entry, rows) in enumerate(entries):
            session = entry.session
            why: Without | None = None
            price: RowPrice | None = None
            if rows.root_row is None:
                continue
            if rows.tree is not None and rows.tree.candidates:
                pass  # it has candidates, not only a lookahead window
            elif place >= decoding:
                why = Without.PROMPT
            elif place >= len(chosen.nodes):
                why = eligibility.why_plain(session)
            elif best := session.candidates().logprobs:
                why, price = chosen.why_none(place, math.exp(best[0])), chosen.prices[place]
            else:
                why = eligibility.why_nothing(session)
            if why is Without.ROW_COST:
                # There is no price if no drafter was asked, because not even a certain candidate would pay.
                price = price or RowPrice(latency.of(total_rows + 1) - latency.of(total_rows), 1.0)
                rows.decision = eligibility.row_cost(session, price)
            else:
                rows.decision = eligibility.decision(session, why)

    def _schedule(
        self,
        packer: Packer,
        speculating: Iterable[tuple[RunningSession, list[Node], LookaheadRows | None]],
        plain: Sequence[RunningSession],
    ) -> Entries:
        """Add the rows of decoding sessions, with their candidates and windows."""
        tree_slots, entries = list(self._tree_slots), []
        for entry, nodes, window in speculating:
            if nodes:
                self._queue.reserve_ahead(entry.session, 1 + max(node.position for node in nodes))
            entries.append((entry, entry.session.plan(packer, 1, nodes, tree_slots, window)))
        return entries + [(entry, entry.session.plan(packer, 1, [], tree_slots)) for entry in plain]

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
