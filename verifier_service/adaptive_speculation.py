"""Adaptive speculation in the step loop: selects a step's mode, has proposers propose, and learns what it brought."""

from __future__ import annotations

import time
from collections.abc import Sequence

import structlog

from verifier_service.backend.result import VerifyResult
from verifier_service.costs.token_budget import select_candidates
from verifier_service.proposers.draft_model import DraftModelProposer
from verifier_service.proposers.proposer import NO_PROPOSALS, ComingStep, Phase, ProposalStats, Proposer
from verifier_service.scheduling.cpu_threads import ThreadPolicy
from verifier_service.scheduling.planner import StepPlan
from verifier_service.sessions.running_session import RunningSession
from verifier_service.sessions.session import Session
from verifier_service.speculation.controller import BatchProfile, SpeculationController
from verifier_service.speculation.eligibility import Eligibility, is_exempt

log = structlog.get_logger()

Results = Sequence[tuple[RunningSession, VerifyResult]]
"""What a step has added to each session's text."""


class AdaptiveSpeculation:
    """Has the controller select modes and the proposers propose, and tells both what came of it."""

    def __init__(
        self,
        controller: SpeculationController,
        draft_model: DraftModelProposer | None,
        proposers: Sequence[Proposer],
        threads: ThreadPolicy,
    ) -> None:
        self.controller = controller
        self.eligibility = Eligibility(controller, draft_model)
        self.proposers = proposers
        self._threads = threads

    def outlook(self, session: Session, sessions: int) -> tuple[bool, float]:
        """Return (True if candidates of a remote draft are wanted, the break-even probability) for a new session.

        It is an estimate before the session's first step, with `sessions` sessions that are all like it. Changes
        nothing: any thread may ask."""
        # Until its prompt is computed the session gets no draft that would take threads from that.
        if self._threads.yields or not self.eligibility.would_draft(session, sessions):
            return False, self.eligibility.price
        price = min(1.0, select_candidates([], self._threads.latency, sessions, 0).price)
        return price < 1.0, price

    def share_threads(self, running: Sequence[RunningSession]) -> None:
        """Decide whether prompts get the CPU cores that drafts would take: they do while most running sessions prefill,
        since beside drafts prompts would take twice as long."""
        if self._threads.yields:
            prefilling = sum(bool(entry.session.remaining_prompt) for entry in running)
            self.eligibility.prefilling = 2 * prefilling > len(running)

    def select(self, sessions: Sequence[Session]) -> BatchProfile | None:
        """Select the mode of the coming step; return the profile of its batch, None if nothing is to be learned from
        it."""
        batch = self.eligibility.profile(sessions)
        if batch is not None:
            self.controller.select(batch, time.monotonic())
        return batch

    def propose(self, phase: Phase, sessions: Sequence[Session]) -> ProposalStats:
        """Let the proposers of a phase add candidates for the coming step."""
        step = ComingStep(sessions, self.eligibility, self._threads.latency, self.eligibility.price)
        seconds, count = NO_PROPOSALS
        for proposer in self.proposers:
            if proposer.phase is phase:
                done = proposer.propose(step)
                seconds, count = seconds + done.seconds, count + done.sessions
        return ProposalStats(seconds, count)

    def update(
        self, batch: BatchProfile, plan: StepPlan, results: Results, *, seconds: float, proposed: ProposalStats
    ) -> None:
        """Tell the controller what a step brought in so many seconds to the sessions that the mode is selected for.

        Exempt sessions of the step are part of what these have to live with. Their tokens do not count: no mode has
        earned them, and many would hide what the mode brings to few. The whole time counts, since it passes for all: a
        share by rows would charge a candidate as much as a root, which costs far more. So the bound of plain decoding
        is that of a step in which the exempt sessions have their rows.
        """
        before, sessions = self.controller.mode, batch.sessions
        exempt_rows, others, yielding = 0, results, self._threads.yielding
        if batch.exempt:
            exempt = [(entry.session, rows) for entry, rows in plan.entries if is_exempt(entry.session)]
            exempt_rows = sum(rows.rows for _, rows in exempt)
            others = [(entry, result) for entry, result in results if not is_exempt(entry.session)]
            yielding = yielding and not any(self.eligibility.uses_remote_draft(session) for session, _ in exempt)
        self.controller.update(
            batch,
            speculated=plan.rows - exempt_rows > sessions or yielding or proposed.sessions > 0,
            tokens=sum(len(result.tokens) for _, result in others),
            seconds=seconds,
            plain_rate=sessions / self._threads.plain_latency.of(sessions + exempt_rows),
        )
        if self.controller.mode is not before:
            log.debug("mode_changed", mode=self.controller.mode.value, before=before.value, sessions=sessions)

    def forget(self, session: Session) -> None:
        """Have the proposers forget a session, which has left or has lost its memory."""
        for proposer in self.proposers:
            proposer.forget(session)

    def finished(self, session: Session) -> None:
        """Have the proposers learn from a text that is complete."""
        for proposer in self.proposers:
            proposer.finished(session)
