"""The step loop: takes rows of all sessions that are ready, runs one forward pass, commits tokens, and starts again.

It runs in its own thread and owns every session and all memory. It never blocks on the network: a session uses the
candidates that have arrived, and a step is delayed only while waiting for more of them pays. `PlainLoop` is the same
without speculation.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import structlog

from specdec.engine.engine import Engine, step_of
from specdec.engine.kv.blocks import BLOCK, BlockPool
from specdec.serving.engine_worker import EngineWorker
from specdec.serving.response_queue import ResponseQueue
from verifier_service.backend import MakeCommit, MemoryUse, SessionBackend
from verifier_service.proposers.draft_model import DraftModelProposer
from verifier_service.proposers.lookup import LookupProposer
from verifier_service.proposers.proposer import NO_PROPOSALS, ComingStep, Phase, ProposalStats, Proposer
from verifier_service.proposers.windows import observe_windows
from verifier_service.publishing.commits import CommitPublisher, StepSeconds
from verifier_service.publishing.stats import VerifierStats
from verifier_service.request import Policy, SessionRequest
from verifier_service.running_session import RunningSession
from verifier_service.scheduling.cpu_threads import thread_policy
from verifier_service.scheduling.planner import Planner, StepPlan
from verifier_service.scheduling.run_queue import RunQueue
from verifier_service.scheduling.step_delay import WaitEstimate, delay_until
from verifier_service.scheduling.step_latency import StepLatency, best_prefill_rows
from verifier_service.scheduling.token_budget import select_candidates
from verifier_service.session import Session
from verifier_service.speculation.controller import BatchProfile, SpeculationController
from verifier_service.speculation.eligibility import Eligibility
from verifier_service.verification.tree_verification import TreeVerification, add_logprobs
from verifier_service.verification.verify_trees import verify_trees, warm_up

log = structlog.get_logger()

MOST_CANDIDATES = 256
"""Most candidates of all sessions in one step; as many slots are set aside as tree slots."""

LIFETIME_SMOOTHING = 0.1

WITHOUT_DRAFT = WaitEstimate(1.0)
"""The wait estimate of a session that brings one token and waits for nothing."""


class StepLoop(EngineWorker[Session], SessionBackend):
    """The step loop of a verifier.

    `step_rows`: rows up to which prompts fill a step, or fewer if a row costs less then; `max_unread_tokens`: tokens
    that a session may be ahead of what its client has read; `suffix_cache_tokens`: tokens of finished texts that are
    kept for each tenant; `latency`: of the target's steps, measured if not given; `draft_model`: the local draft;
    `proposers`: further drafters.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        step_rows: int = 512,
        max_unread_tokens: int = 256,
        suffix_cache_tokens: int = 0,
        latency: StepLatency | None = None,
        controller: SpeculationController | None = None,
        draft_model: DraftModelProposer | None = None,
        proposers: Sequence[Proposer] = (),
    ) -> None:
        super().__init__("step-loop", engine)
        self.stats = VerifierStats()
        self._forward = step_of(engine)
        blocks = max(2, (engine.capacity - MOST_CANDIDATES) // BLOCK)
        self.pool = BlockPool(blocks)
        tree_slots = list(range(blocks * BLOCK, engine.capacity))[:MOST_CANDIDATES]
        self._queue = RunQueue(engine, self.pool, self.stats, max_unread_tokens, self._on_preempt)
        slots = blocks * BLOCK
        beside = [] if draft_model is None else [draft_model.engine]
        self._threads = thread_policy(engine, lambda: latency or StepLatency.measure(engine, slots), beside)
        step_rows = step_rows if latency is not None else best_prefill_rows(engine, slots, step_rows)
        warm_up(engine.vocabulary)
        self._controller = controller or SpeculationController()
        self._eligibility = Eligibility(self._controller, draft_model)
        self._proposers = [LookupProposer(suffix_cache_tokens), *([draft_model] if draft_model else []), *proposers]
        self._planner = Planner(self._queue, self._threads, self._eligibility, tree_slots, step_rows)
        self._publisher = CommitPublisher(self._queue, self._planner, self._eligibility)
        self._last_step = 0.0  # when the last step ended
        self._idle = True  # there has been nothing to do since then
        self._delayed_since: float | None = None  # when the delay of the coming step began

    @property
    def context(self) -> int:
        """The number of tokens that one session can have memory for at most."""
        return self.pool.usable * BLOCK

    def memory(self) -> MemoryUse:
        pool = self.pool
        return MemoryUse(pool.usable * BLOCK, pool.held * BLOCK, pool.cached * BLOCK)

    def fitting(self, tokens: float) -> int:
        return int(self.pool.available * BLOCK / tokens)

    def session(self, request: SessionRequest, policy: Policy, max_nodes: int, vocabulary: int) -> Session:
        return Session(request, policy, max_nodes, vocabulary)

    def drafting_outlook(self, session: Session, sessions: int) -> tuple[bool, float]:
        """Return (True if candidates of a remote draft are wanted, the break-even probability) for a new session.

        It is an estimate before the session's first step, with `sessions` sessions that are all like it. Changes
        nothing: any thread may ask.
        """
        # Until its prompt is computed the session gets no draft that would take threads from that.
        if self._threads.yields or not self._eligibility.would_draft(session, sessions):
            return False, self._planner.price
        price = min(1.0, select_candidates([], self._threads.latency, sessions, 0).price)
        return price < 1.0, price

    # --- actions: called in the loop's thread -------------------------------------------------------

    def serve(self, session: Session, responses: ResponseQueue[Any], commit: MakeCommit) -> None:
        self.attach(RunningSession(session, responses, commit))

    def attach(self, entry: RunningSession) -> None:
        """Queue a session for memory; EngineLostError if nothing can be computed."""
        self.check_works()
        self._queue.add(entry)

    def detach(self, session: Session) -> None:
        """Forget a session and free its memory, whatever state it is in."""
        self._queue.remove(session)
        self._forget(session)

    # --- a step -------------------------------------------------------------------------------------

    def step(self) -> float | None:
        self._queue.admit()
        ready, suspect = self._ready()
        if not ready:
            self._delayed_since, self._idle = None, True
            return None  # the next action wakes the loop
        sessions = [entry.session for entry in ready]
        self._count_ready(ready)
        self._settle_prefill_threads()
        batch = None if suspect else self._eligibility.profile(sessions)
        if batch is not None:
            self._controller.select(batch, time.monotonic())
        self._propose(Phase.BEFORE_DELAY, sessions)
        if (delay := self._delay(sessions)) is not None:
            return delay
        self.stats.step_begun, self.stats.step_expected = time.monotonic(), 0.0
        proposed = self._propose(Phase.AFTER_DELAY, sessions)
        kept = [entry for entry in ready if self._queue.reserve_text(entry)]
        if kept:
            self._run_step(kept, batch, proposed)
        self.stats.step_begun = 0.0
        self._delayed_since = None
        return 0.0

    def _ready(self) -> tuple[list[RunningSession], bool]:
        """Return the sessions that a step can take; only one, and True, if it is to show whether a step with it
        fails."""
        ready = [e for e in self._queue.running if e.session.computable and not self._queue.throttled(e)]
        suspect = self._retry.next({entry.session for entry in ready}) if ready else None
        if suspect is None:
            return ready, False
        return [entry for entry in ready if entry.session is suspect], True

    def _propose(self, phase: Phase, sessions: Sequence[Session]) -> ProposalStats:
        """Let the proposers of a phase add candidates for the coming step."""
        step = ComingStep(sessions, self._eligibility, self._threads.latency, self._planner.price)
        seconds, count = NO_PROPOSALS
        for proposer in self._proposers:
            if proposer.phase is phase:
                done = proposer.propose(step)
                seconds, count = seconds + done.seconds, count + done.sessions
        return ProposalStats(seconds, count)

    def _delay(self, sessions: Sequence[Session]) -> float | None:
        """Return for how long to delay the step, in seconds, since candidates that are on their way are worth it."""
        now = time.monotonic()
        drafted = [self._eligibility.uses_remote_draft(session) for session in sessions]
        self._threads.choose(drafting=any(drafted), now=now)
        if not any(drafted) or any(session.remaining_prompt for session in sessions):
            return None
        estimates = [
            session.wait_estimate(now, self._planner.price) if has_draft else WITHOUT_DRAFT
            for session, has_draft in zip(sessions, drafted, strict=True)
        ]
        until = delay_until(estimates, now, self._last_step, self._threads.latency.of(len(sessions)))
        if until is None:
            return None
        self._delayed_since = self._delayed_since or now
        return until - now

    def _run_step(self, ready: list[RunningSession], batch: BatchProfile | None, proposed: ProposalStats) -> None:
        # 1. Collect every session's rows.
        start = time.monotonic()
        waited = start - self._delayed_since if self._delayed_since else 0.0
        plan = self._planner.plan(self._engine.packer(), ready, proposed.seconds)
        self.stats.step_expected = plan.expected

        # 2. Run one forward pass, and verify all trees.
        try:
            forward_start = time.monotonic()
            pairs = [(e, TreeVerification(e.session, rows)) for e, rows in plan.entries if rows.root_row is not None]
            verifications = [verification for _, verification in pairs]
            logits = self._forward(
                plan.packer.pack(), lambda: dict(query for each in verifications for query in each.queries())
            )
            forward_time = time.monotonic() - forward_start
            verify_trees(verifications, logits)
            observe_windows(verifications, logits)
        except Exception as error:  # nothing of the step counts; its sessions are tried again
            self.step_failed([entry.session for entry, _ in plan.entries], plan.slots, error)
            return

        # 3. Commit what was accepted.
        for entry, rows in plan.entries:
            self._retry.forget(entry.session)
            if rows.root_row is None:
                entry.session.computed += rows.count
        kept = [(entry, verification) for entry, verification in pairs if verification.error is None]
        self._queue.copy_rows([move for _, verification in kept for move in verification.kv_copies])
        add_logprobs([verification for _, verification in kept], logits)
        begin = start - proposed.seconds if self._idle else self._last_step
        end = self._last_step = time.monotonic()
        self._idle = False
        results = [(entry, entry.session.apply(verification, end)) for entry, verification in kept]
        for entry, _ in kept:  # not of unfinished prompts: whether their logits are finite is not known yet
            entry.session.cache_prefix()
        for entry, verification in pairs:
            if verification.error is not None:
                self._quarantine(entry, verification.error)

        # 4. Learn from the step, and send its results.
        self._planner.observe(plan, end - start)
        self.stats.observe(plan.rows, end - start, [result for _, result in results])
        if batch is not None and plan.decodes_only and batch.sessions == len(results):
            self._update_controller(batch, plan, end - begin, sum(len(r.tokens) for _, r in results), proposed)
        self._settle_prefill_threads()
        self._publisher.publish(results, StepSeconds(forward_time, end - start, waited))
        for entry, result in results:
            entry.awaiting_draft = entry.session.policy.remote
            if result.finish:
                self._finish(entry)

    def _update_controller(
        self, batch: BatchProfile, plan: StepPlan, seconds: float, tokens: int, proposed: ProposalStats
    ) -> None:
        """Tell the controller what a step of a batch brought."""
        before, sessions = self._controller.mode, batch.sessions
        self._controller.update(
            batch,
            speculated=plan.rows > sessions or self._threads.yielding or proposed.sessions > 0,
            tokens=tokens,
            seconds=seconds,
            plain_rate=sessions / self._threads.plain_latency.of(sessions),
        )
        if self._controller.mode is not before:
            log.debug("mode_changed", mode=self._controller.mode.value, before=before.value, sessions=sessions)

    def _finish(self, entry: RunningSession) -> None:
        """End a session whose text is complete."""
        for proposer in self._proposers:
            proposer.finished(entry.session)
        self.stats.lifetime += LIFETIME_SMOOTHING * (time.monotonic() - entry.admitted_at - self.stats.lifetime)
        self.detach(entry.session)

    def _settle_prefill_threads(self) -> None:
        """Decide whether prompts get the CPU cores that drafts would take: they do while most running sessions prefill,
        since beside drafts prompts would take twice as long."""
        if self._threads.yields:
            prefilling = sum(bool(entry.session.remaining_prompt) for entry in self._queue.running)
            self._eligibility.prefilling = 2 * prefilling > len(self._queue.running)

    def _count_ready(self, ready: Sequence[RunningSession]) -> None:
        """Count the sessions that have a draft, and those whose next candidates came while the last step was under way:
        the coming step has not been delayed yet."""
        for entry in ready:
            if entry.awaiting_draft:
                self.stats.drafted_steps += 1
                self.stats.draft_ready_steps += entry.session.has_draft_candidates
                entry.awaiting_draft = False

    # --- sessions that leave, and failures ----------------------------------------------------------

    def _on_preempt(self, entry: RunningSession) -> None:
        """Send what is pending of a session that is about to lose its memory; proposers forget it."""
        self._publisher.send_pending(entry)
        self._forget(entry.session)

    def _forget(self, session: Session) -> None:
        self._retry.forget(session)
        for proposer in self._proposers:
            proposer.forget(session)

    def end_session(self, session: Session, error: Exception) -> None:
        (entry,) = (entry for entry in self._queue.all if entry.session is session)
        self._quarantine(entry, error)

    def end_sessions(self, error: Exception) -> None:
        for entry in self._queue.all:
            self._publisher.send_pending(entry)
            self.detach(entry.session)
            entry.responses.send(error)
        self.pool.forget_prefixes()

    def _quarantine(self, entry: RunningSession, error: Exception) -> None:
        """End a session that failed, and wipe its memory: a NaN in it would spread to the session that gets it next."""
        log.error("session_failed", exc_info=error)
        self._publisher.send_pending(entry)
        self._queue.remove(entry.session, wipe=True)
        self._forget(entry.session)
        entry.responses.send(error)
