"""The plan of a step: which rows of which session it computes."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

import numpy as np

from specdec.engine.batch import Packer
from specdec.engine.kv.slots import Slots
from verifier_service.costs.token_budget import select_candidates
from verifier_service.proposers.windows import open_windows
from verifier_service.scheduling.cpu_threads import ThreadPolicy
from verifier_service.scheduling.prefill import PrefillSlowdown, prefill_chunks
from verifier_service.scheduling.run_queue import RunQueue
from verifier_service.scheduling.shares import Urgent, prompt_weights
from verifier_service.sessions.running_session import RunningSession
from verifier_service.sessions.step_rows import ScheduledRows
from verifier_service.settings.tuning import Tuning
from verifier_service.speculation.eligibility import Eligibility


@dataclass(frozen=True)
class StepPlan:
    """A packed batch in the making, and where each session's rows are in it."""

    packer: Packer
    entries: list[tuple[RunningSession, ScheduledRows]]
    rows: int  # without those that packing adds
    expected: float  # seconds
    sitting_out: list[RunningSession]  # that decode, and have no rows in it

    @property
    def slots(self) -> Slots:
        """The KV slots that the step writes."""
        return np.asarray(self.packer.slots, dtype=np.int64)

    @property
    def decodes_only(self) -> bool:
        """True if the step has nothing of a prompt, not even the end of one."""
        return all(rows.root_row is not None and rows.count == 1 for _, rows in self.entries)


class Planner:
    """Fills steps: the roots of sessions that decode, the candidates that pay, lookahead windows, chunks of prompts.

    `tree_slots` are for side branches of token trees. Beside sessions that decode, prompts fill a step as far as time
    allows, up to `step_rows`; otherwise up to `prefill_rows`.
    """

    def __init__(
        self,
        queue: RunQueue,
        threads: ThreadPolicy,
        eligibility: Eligibility,
        tree_slots: Sequence[int],
        step_rows: int,
        prefill_rows: int,
        tuning: Tuning,
    ) -> None:
        self._tuning = tuning
        self._queue = queue
        self._threads = threads
        self._eligibility = eligibility
        self._tree_slots = tree_slots
        self._step_rows = step_rows
        self._prefill_rows = prefill_rows
        self._prefill_slowdown = PrefillSlowdown(tuning.prefill)
        self._waited = 0  # steps in a row in which texts have waited for prompts of others

    def plan(self, packer: Packer, ready: Sequence[RunningSession], spent: float) -> StepPlan:
        """Add the rows of sessions, all but those that wait for prompts of others, to an empty batch; proposers have
        `spent` so many seconds for them."""
        prompts, plain, speculating = self._sorted(ready)
        decoders = [*plain, *speculating]
        urgent = self._queue.shares.urgent(prompts, decoders)
        # Whoever comes, texts do not wait for prompts of others without end.
        goes_first = bool(urgent.tenants) and self._waited < self._tuning.prefill.most_waiting_steps
        if decoders:
            self._waited = self._waited + 1 if goes_first else 0
        sitting_out: list[RunningSession] = []
        if goes_first and self._give_way(prompts, urgent, decoders):
            sitting_out = [entry for entry in decoders if entry.tenant in urgent.yielding]
            prompts = [entry for entry in prompts if entry.tenant in urgent.tenants]
            plain, speculating = (
                [entry for entry in entries if entry.tenant not in urgent.yielding] for entries in (plain, speculating)
            )
        decoding, latency, tree_slots = len(plain) + len(speculating), self._threads.latency, list(self._tree_slots)
        offers = [entry.session.candidates() for entry in speculating]
        # A step with prompts would not show what it explores.
        chosen, price, exploring = select_candidates(
            offers, latency, decoding, len(tree_slots), spent, explore=decoding > 0 and not prompts
        )
        if exploring is not None:
            latency.explore(exploring)
        if decoding:
            self._eligibility.observe_price(price, self._tuning.price_smoothing)
        free = len(tree_slots) - sum(map(len, chosen))
        sessions = [entry.session for entry in speculating]
        may_explore = exploring is None and not prompts
        windows = open_windows(sessions, chosen, decoding, free, latency, self._eligibility, may_explore=may_explore)
        entries: list[tuple[RunningSession, ScheduledRows]] = []
        for entry, nodes, window in zip(speculating, chosen, windows, strict=True):
            self._queue.reserve_candidates(entry.session, nodes)
            rows = entry.session.plan(packer, 1, nodes, tree_slots, window)
            rows.undrafted = self._eligibility.lacks_remote_draft(entry.session)
            rows.drafted = not rows.undrafted and self._eligibility.uses_remote_draft(entry.session)
            entries.append((entry, rows))
        for entry in (*plain, *prompts):
            entry.session.ngrams.close_window()
        entries += [(entry, entry.session.plan(packer, 1, [], tree_slots)) for entry in plain]
        for entry, chunk in self._chunks(prompts, urgent.tenants, goes_first, decoding, len(packer.tokens)):
            entries.append((entry, entry.session.plan(packer, chunk, [], tree_slots)))
        taken = len(packer.tokens)
        plan = StepPlan(packer, entries, taken, latency.of(taken), sitting_out)
        return plan if plan.decodes_only else replace(plan, expected=plan.expected * self._prefill_slowdown.factor)

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Learn from how long a step took. T_v is that of short texts: rows of a long prompt would teach it more."""
        if plan.decodes_only:
            self._threads.observe(plan.rows, seconds)
        else:
            self._prefill_slowdown.observe(self._threads.latency.of(plan.rows), seconds)

    def _chunks(
        self, prompts: Sequence[RunningSession], urgent: Set[str], goes_first: bool, decoding: int, rows: int
    ) -> list[tuple[RunningSession, int]]:
        """Return how many tokens of each prompt are computed beside so many `rows` of `decoding` sessions. Those of
        `urgent` tenants come before other prompts and, where that `goes_first`, are not cut up for those sessions."""
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
        """Return whether sessions that yield to `urgent` prompts sit out this step, since it is shorter so: where more
        rows take no more time, they need not."""
        rows = sum(entry.session.computable for entry in prompts if entry.tenant in urgent.tenants)
        if not rows:
            return False
        staying = sum(entry.tenant not in urgent.yielding for entry in decoding)
        rows = min(rows, self._prefill_rows)
        latency = self._threads.latency
        return latency.of(rows + len(decoding)) > self._tuning.prefill.worth_a_wait * latency.of(rows + staying)

    def _sorted(self, ready: Sequence[RunningSession]) -> tuple[list[RunningSession], ...]:
        """Return the sessions that prefill, those that decode without candidates, and those that may have some."""
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
