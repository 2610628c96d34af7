"""Adaptive speculation in the step loop: selects modes, runs proposers, and updates both with the outcome of steps."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import structlog

from specdec.decoding.speculation import Outlook
from specdec.decoding.step_logits import StepLogits
from verifier_service.backend.result import REMOTE_DRAFT, Mode, VerifyResult
from verifier_service.costs.token_budget import select_candidates
from verifier_service.proposers.proposer import NO_PROPOSALS, ComingStep, Phase, ProposalStats, Proposer
from verifier_service.scheduling.cpu_threads import ThreadPolicy
from verifier_service.scheduling.planner import StepPlan
from verifier_service.sessions.draft_timing import TenantGains
from verifier_service.sessions.running_session import RunningSession
from verifier_service.sessions.session import VerifierSession
from verifier_service.settings.tuning import DraftGainTuning
from verifier_service.speculation.controller import BatchProfile, Controllers, SpeculationController
from verifier_service.speculation.eligibility import LOCAL_MODELS, Eligibility, LocalModel, is_exempt
from verifier_service.verification.tree_verification import Prompts, TreeVerification

log = structlog.get_logger()

Results = Sequence[tuple[RunningSession, VerifyResult]]
"""The tokens added by a step to each session's text."""


class Batch(NamedTuple):
    """Sessions of a step with a common mode, and the controller that selects it."""

    controller: SpeculationController
    profile: BatchProfile
    sessions: frozenset[VerifierSession]  # without exempt ones


class AdaptiveSpeculation:
    """Runs controllers and proposers for the step loop, and feeds them the outcome of steps."""

    def __init__(
        self,
        controllers: Controllers,
        local_model: LocalModel | None,
        proposers: Sequence[Proposer],
        threads: ThreadPolicy,
        tuning: DraftGainTuning,
    ) -> None:
        self.eligibility = Eligibility(controllers, local_model)
        self.tenant_gains = TenantGains(tuning)
        self.mode = Mode.REMOTE_DRAFT
        """The mode of the largest batch in the last step."""
        self.rates: Mapping[str, float] | None = None
        """Tokens a second by mode, as last measured for that batch."""
        self._controllers = controllers
        self.proposers = proposers
        self._threads = threads

    def outlook(self, session: VerifierSession, sessions: int) -> Outlook:
        """Return a session's outlook before its first step, as one of `sessions` similar sessions. No side effects;
        thread-safe."""
        # If drafts take threads, the session gets no draft during prefill.
        if self._threads.yields or not self.eligibility.would_draft(session, sessions):
            return Outlook(False, self.eligibility.break_even)
        break_even = min(1.0, select_candidates([], self._threads.latency, sessions, 0).break_even)
        return Outlook(break_even < 1.0, break_even)

    def share_threads(self, running: Sequence[RunningSession]) -> None:
        """Decide whether prompts get the CPU cores of drafts: yes while most running sessions are in prefill, which
        would take twice as long beside drafts."""
        if self._threads.yields:
            prefilling = sum(bool(entry.session.remaining_prompt) for entry in running)
            self.eligibility.prefilling = 2 * prefilling > len(running)

    def select(self, sessions: Sequence[VerifierSession]) -> list[Batch]:
        """Select the modes of the coming step; return its batches, except those that cannot speculate."""
        now, batches = time.monotonic(), []
        for controller, members in self._controllers.select(sessions):
            profile = self.eligibility.profile(members, beside=len(sessions) - len(members))
            if profile is not None:
                controller.select(profile, now)
                led = frozenset(session for session in members if not is_exempt(session))
                batches.append(Batch(controller, profile, led))
        self._note_mode(batches)
        return batches

    def propose(self, phase: Phase, sessions: Sequence[VerifierSession]) -> ProposalStats:
        """Run the proposers of a phase for the coming step."""
        step = ComingStep(sessions, self.eligibility, self._threads.latency, self.eligibility.break_even)
        seconds, count = NO_PROPOSALS
        for proposer in self.proposers:
            if proposer.phase is phase:
                done = proposer.propose(step)
                seconds, count = seconds + done.seconds, count + done.sessions
        return ProposalStats(seconds, count)

    def observe(self, verifications: Sequence[TreeVerification], prompts: Prompts, logits: StepLogits) -> None:
        """Have the proposers learn from a verified step, before its tokens are committed."""
        for proposer in self.proposers:
            if prompts:
                proposer.observe_prompts(prompts, logits)
            proposer.observe(verifications, logits)

    def shared_out(
        self, decoding: Sequence[RunningSession], before_delay: float, after_delay: float
    ) -> dict[RunningSession, float]:
        """Return each session's share of the proposers' seconds for a step. The seconds before the delay are divided
        among all sessions that use proposers; the seconds after it are the local model's, and are divided among the
        sessions that use that model."""
        found = dict.fromkeys(decoding, 0.0)
        users = [entry for entry in decoding if self.eligibility.uses_proposers(entry.session)]
        local = [entry for entry in users if self.eligibility.uses_local_model(entry.session)]
        for entries, seconds in ((users, before_delay), (local or users, after_delay)):
            for entry in entries:
                found[entry] += seconds / len(entries)
        return found

    def update(
        self, batches: Sequence[Batch], plan: StepPlan, results: Results, *, seconds: float, proposed: ProposalStats
    ) -> None:
        """Update each controller with the tokens of its own sessions, over the `seconds` of the whole step.

        Other sessions' tokens do not count: the mode did not produce them, and in large numbers they would hide its
        effect. Their time counts, since it passes for all sessions, so the upper bound on the rate of plain decoding
        includes their rows. The time is not divided by rows: that would charge a candidate as much as a root, which
        costs far more.
        """
        rows_of = {entry.session: rows.rows for entry, rows in plan.entries}
        tokens_of = {entry.session: len(result.tokens) for entry, result in results}
        all_rows, drafted = sum(rows_of.values()), set[VerifierSession]()
        if self._threads.yielding:
            drafted = {session for session in rows_of if self.eligibility.uses_remote_draft(session)}
        for controller, batch, led in batches:
            before, sessions = controller.mode, batch.sessions
            other_rows, yielding = 0, self._threads.yielding
            if batch.exempt:
                other_rows = all_rows - sum(rows_of[session] for session in led)
                yielding = yielding and drafted <= led  # else other sessions' drafts take the threads too
            # Speculation costs even without candidates: threads yielded to drafts, or a local model's time.
            proposed_for = proposed.sessions > 0 and before in LOCAL_MODELS.values()
            controller.update(
                batch,
                speculated=all_rows - other_rows > sessions or yielding or proposed_for,
                tokens=sum(tokens_of[session] for session in led) if batch.exempt else sum(tokens_of.values()),
                seconds=seconds,
                plain_rate=sessions / self._threads.plain_latency.of(sessions + other_rows),
            )
            if controller.mode is not before:
                log.debug("mode_changed", mode=controller.mode.value, before=before.value, sessions=sessions)
        self._note_mode(batches)

    def observe_drafts(self, plan: StepPlan, results: Results) -> None:
        """Update each text's draft gain from a step, unless its draft was late."""
        drafted = {entry.session: rows.drafted for entry, rows in plan.entries}
        for entry, result in results:
            session = entry.session
            if not session.policy.remote or is_exempt(session):
                continue
            if not session.draft_gain.helps:
                session.draft_gain.rest()
            elif drafted[session]:
                accepted = result.sources.count(REMOTE_DRAFT)
                session.draft_gain.observe(accepted)
                self.tenant_gains.observe(session.request.tenant, accepted)

    def _note_mode(self, batches: Sequence[Batch]) -> None:
        if batches:
            controller = max(batches, key=lambda batch: len(batch.sessions)).controller
            self.mode, self.rates = controller.mode, controller.rates

    def forget(self, session: VerifierSession) -> None:
        """Have the proposers forget a session that left or was preempted."""
        for proposer in self.proposers:
            proposer.forget(session)

    def finished(self, session: VerifierSession) -> None:
        """Have the proposers learn from a complete text."""
        for proposer in self.proposers:
            proposer.finished(session)
