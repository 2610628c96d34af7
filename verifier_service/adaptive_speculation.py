"""Adaptive speculation in the step loop: selects a step's mode, has proposers propose, and learns what it brought."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import structlog

from verifier_service.backend.result import REMOTE_DRAFT, VerifyResult
from verifier_service.costs.token_budget import select_candidates
from verifier_service.proposers.draft_model import DraftModelProposer
from verifier_service.proposers.proposer import NO_PROPOSALS, ComingStep, Phase, ProposalStats, Proposer
from verifier_service.scheduling.cpu_threads import ThreadPolicy
from verifier_service.scheduling.planner import StepPlan
from verifier_service.sessions.draft_gain import TenantGains
from verifier_service.sessions.running_session import RunningSession
from verifier_service.sessions.session import Session
from verifier_service.settings.tuning import DraftGainTuning
from verifier_service.speculation.controller import BatchProfile, Mode, SpeculationController
from verifier_service.speculation.controllers import Controllers
from verifier_service.speculation.eligibility import Eligibility, is_exempt

log = structlog.get_logger()

Results = Sequence[tuple[RunningSession, VerifyResult]]
"""What a step has added to each session's text."""


class Batch(NamedTuple):
    """Sessions of a step that have one mode, and the controller that selects it."""

    controller: SpeculationController
    profile: BatchProfile
    sessions: frozenset[Session]  # without those that are exempt


class AdaptiveSpeculation:
    """Has controllers select modes and the proposers propose, and tells both what came of it."""

    def __init__(
        self,
        controllers: Controllers,
        draft_model: DraftModelProposer | None,
        proposers: Sequence[Proposer],
        threads: ThreadPolicy,
        tuning: DraftGainTuning,
    ) -> None:
        self.eligibility = Eligibility(controllers, draft_model)
        self.tenant_gains = TenantGains(tuning)
        self.mode = Mode.REMOTE_DRAFT
        """The mode that most sessions of the last step had."""
        self._controllers = controllers
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

    def select(self, sessions: Sequence[Session]) -> list[Batch]:
        """Select the modes of the coming step; return its batches, without those from which nothing is to be
        learned."""
        now, batches = time.monotonic(), []
        for controller, members in self._controllers.select(sessions):
            profile = self.eligibility.profile(members, beside=len(sessions) - len(members))
            if profile is not None:
                controller.select(profile, now)
                led = frozenset(session for session in members if not is_exempt(session))
                batches.append(Batch(controller, profile, led))
        self._note_mode(batches)
        return batches

    def propose(self, phase: Phase, sessions: Sequence[Session]) -> ProposalStats:
        """Let the proposers of a phase add candidates for the coming step."""
        step = ComingStep(sessions, self.eligibility, self._threads.latency, self.eligibility.price)
        seconds, count = NO_PROPOSALS
        for proposer in self.proposers:
            if proposer.phase is phase:
                done = proposer.propose(step)
                seconds, count = seconds + done.seconds, count + done.sessions
        return ProposalStats(seconds, count)

    def shared_out(
        self, decoding: Sequence[RunningSession], before_delay: float, after_delay: float
    ) -> dict[RunningSession, float]:
        """Return the seconds that proposers have taken for each session of a step: the local model, which acts after
        the delay, for those that use it, the others for all that use proposers."""
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
        """Tell the controllers what a step brought in so many seconds to the sessions that each selects the mode of.

        The other sessions of the step are part of what these have to live with. Their tokens do not count: this mode
        has not earned them, and many would hide what the mode brings to few. The whole time counts, since it passes for
        all: a share by rows would charge a candidate as much as a root, which costs far more. So the bound of plain
        decoding is that of a step in which the other sessions have their rows.
        """
        rows_of = {entry.session: rows.rows for entry, rows in plan.entries}
        tokens_of = {entry.session: len(result.tokens) for entry, result in results}
        all_rows, drafted = sum(rows_of.values()), set[Session]()
        if self._threads.yielding:
            drafted = {session for session in rows_of if self.eligibility.uses_remote_draft(session)}
        for controller, batch, led in batches:
            before, sessions = controller.mode, batch.sessions
            other_rows, yielding = 0, self._threads.yielding
            if batch.exempt:
                other_rows = all_rows - sum(rows_of[session] for session in led)
                yielding = yielding and drafted <= led
            proposed_for = proposed.sessions > 0 and before is Mode.LOCAL_DRAFT
            controller.update(
                batch,
                speculated=plan.rows - other_rows > sessions or yielding or proposed_for,
                tokens=sum(tokens_of[session] for session in led) if batch.exempt else sum(tokens_of.values()),
                seconds=seconds,
                plain_rate=sessions / self._threads.plain_latency.of(sessions + other_rows),
            )
            if controller.mode is not before:
                log.debug("mode_changed", mode=controller.mode.value, before=before.value, sessions=sessions)
        self._note_mode(batches)

    def observe_drafts(self, plan: StepPlan, results: Results) -> None:
        """Learn what its remote draft has brought to each text of a step, unless it came too late to say."""
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
            self.mode = max(batches, key=lambda batch: len(batch.sessions)).controller.mode

    def forget(self, session: Session) -> None:
        """Have the proposers forget a session, which has left or has lost its memory."""
        for proposer in self.proposers:
            proposer.forget(session)

    def finished(self, session: Session) -> None:
        """Have the proposers learn from a text that is complete."""
        for proposer in self.proposers:
            proposer.finished(session)
