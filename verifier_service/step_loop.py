"""The step loop: takes rows of all ready sessions, runs one forward pass, commits tokens, and repeats.

It runs in its own thread and owns every session and all memory. It never blocks on the network: a session uses the
candidates that have arrived, and a step waits for more only while that pays. Tests
compare it with a loop without speculation (`tests/verifier_service/plain_loop.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import structlog

from specdec.decoding.query import SamplingQuery
from specdec.decoding.speculation import Outlook
from specdec.decoding.step_logits import StepLogits
from specdec.engine.engine import Engine, Pass, chains_only, launch_of, longest_text, on_cpu, queues_passes
from specdec.engine.kv.blocks import BLOCK, BlockPool
from specdec.engine.kv.slots import PADDING_SLOT
from specdec.engine.probe import EngineProbe
from specdec.engine.start_phases import phase
from specdec.engine.working_memory import MAX_STEP_CANDIDATES
from specdec.serving.engine_worker import EngineWorker
from specdec.serving.errors import GrammarFailureError, ShortOfMemoryError
from specdec.serving.response_queue import ResponseQueue
from specdec.serving.timeline import Timeline
from verifier_service.adaptive_speculation import AdaptiveSpeculation, Batch, Results
from verifier_service.backend.request import Policy, VerifierSessionRequest
from verifier_service.backend.result import StepSeconds
from verifier_service.backend.session_backend import MemoryUse, ResponseMaker, SessionBackend
from verifier_service.backend.stats import VerifierStats
from verifier_service.commits import CommitPublisher
from verifier_service.costs.step_latency import StepLatency, best_prefill_rows
from verifier_service.proposers.draft_model import DraftModelProposer
from verifier_service.proposers.forced import ForcedTokens
from verifier_service.proposers.lookup import LookupProposer
from verifier_service.proposers.proposer import NO_PROPOSALS, Phase, ProposalStats, Proposer
from verifier_service.scheduling.cpu_threads import thread_policy
from verifier_service.scheduling.planner import Planner, StepPlan
from verifier_service.scheduling.run_queue import RunQueue
from verifier_service.scheduling.step_delay import StepDelay
from verifier_service.scheduling.step_shares import Division
from verifier_service.sessions.draft_timing import DraftGain
from verifier_service.sessions.running_session import RunningSession
from verifier_service.sessions.session import VerifierSession
from verifier_service.sessions.window_gain import WindowsByTenant
from verifier_service.settings.tuning import DEFAULTS, Tuning
from verifier_service.speculation.controller import Controllers, SpeculationController
from verifier_service.verification.tree_verification import warm_up
from verifier_service.verification.verified_step import VerifiedStep, grammar_seconds, verify_step

if TYPE_CHECKING:  # imports torch
    from verifier_service.proposers.feature_source import FeatureSource
    from verifier_service.proposers.heads import HeadsProposer

log = structlog.get_logger()


class _RunningStep(NamedTuple):
    """A step whose forward pass has begun. Times are from `time.monotonic`."""

    plan: StepPlan
    computing: Pass
    begun: float  # start of planning, or of the pass if launched early
    pass_begun: float


@dataclass(frozen=True)
class _FailedPass:
    """A pass that could not begin."""

    error: Exception

    def logits(self, asked: Callable[[], Mapping[int, SamplingQuery]]) -> StepLogits:
        raise self.error


class StepLoop(EngineWorker[VerifierSession], SessionBackend):
    """The step loop of a verifier.

    `step_rows`: limit on the rows of a step with prompts; steps of only prompts have fewer if more rows save nothing
    (`StepPrompts`); `max_unread_tokens`: tokens a session may be ahead of its client's reading;
    `suffix_cache_tokens`: tokens of finished texts kept per tenant; unless it is 0, a tenant's texts also share the
    n-grams of their windows; `latency`: latency model of the target's steps, measured by default; `controller`: a
    single controller for all texts, instead of one per group; `draft_model`: the local draft; `heads`: used in place of
    a local draft; `features`: source of features for draft services, not together with heads; `proposers`: additional
    proposers; `block_verification`: verify chains of draws as blocks (REJECTION); `tuning`: fitted constants.
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
        heads: HeadsProposer[Any] | None = None,
        features: FeatureSource | None = None,
        proposers: Sequence[Proposer] = (),
        block_verification: bool = True,
        tuning: Tuning = DEFAULTS,
    ) -> None:
        super().__init__("step-loop")
        self._block_verification = block_verification
        self.stats = VerifierStats()
        self._engine = engine
        self.chains_only = chains_only(engine)
        self._longest_text = longest_text(engine)
        self._tuning = tuning
        self._probe = EngineProbe(engine)
        states = heads or features
        self._launch = launch_of(engine) if states is None else states.launch_of(engine)
        self._queues_passes = queues_passes(engine)
        self._early: _RunningStep | None = None  # the next step, launched before the last one was committed
        set_aside = 0 if self.chains_only else MAX_STEP_CANDIDATES
        blocks = max(2, (engine.capacity - set_aside) // BLOCK)
        self.pool = BlockPool(blocks)
        tree_slots = list(range(blocks * BLOCK, engine.capacity))[:MAX_STEP_CANDIDATES]
        if self.chains_only:  # candidates use the text's own slots; the tree slots only limit their number
            tree_slots = [PADDING_SLOT] * MAX_STEP_CANDIDATES
        self._queue = RunQueue(engine, self.pool, self.stats, max_unread_tokens, self._on_preempt)
        slots = blocks * BLOCK
        beside = [] if draft_model is None else [draft_model.engine]
        with phase("step_times"):
            self._threads = thread_policy(
                engine, lambda: latency or StepLatency.measure(engine, slots, tuning.latency), beside, tuning.threads
            )
            prefill_rows = step_rows if latency is not None else best_prefill_rows(engine, slots, step_rows)
        with phase("compiled_loops"):
            warm_up(engine.vocabulary)
        local = draft_model or heads
        assert draft_model is None or heads is None
        assert heads is None or features is None
        self._features = features
        own: list[Proposer] = [proposer for proposer in (local, features) if proposer is not None]
        # Under REJECTION a place takes the candidates of one proposer: the first in this list has precedence.
        proposers = [ForcedTokens(), LookupProposer(suffix_cache_tokens), *own, *proposers]
        controllers = Controllers(tuning.controller, controller)
        self._speculation = AdaptiveSpeculation(controllers, local, proposers, self._threads, tuning.draft_gain)
        eligibility = self._speculation.eligibility
        self._planner = Planner(
            engine.packer, self._queue, self._threads, eligibility, tree_slots, step_rows, prefill_rows, tuning
        )
        self._publisher = CommitPublisher(self._queue, controllers, eligibility, tuning.commits, on_cpu=on_cpu(engine))
        self._windows = WindowsByTenant(pooled=suffix_cache_tokens > 0)
        self._delay = StepDelay()
        self._last_step = 0.0  # end of the last step
        self._idle = True  # nothing to do since the last step
        self._looked_up = 0.0  # seconds of proposers that run before the step delay, since the last step

    @property
    def features_fingerprint(self) -> str:  # type: ignore[override]
        return self._features.fingerprint if self._features is not None and self._features.works else ""

    @property
    def context(self) -> int:
        """Maximum tokens of memory for one session."""
        slots = self.pool.usable * BLOCK
        return slots if self._longest_text is None else min(slots, self._longest_text)

    def memory(self) -> MemoryUse:
        pool = self.pool
        return MemoryUse(pool.usable * BLOCK, pool.held * BLOCK, pool.cached * BLOCK)

    def known_prefix(self, hashes: Iterable[int]) -> int:
        return self.pool.known_prefix(hashes)

    def fitting(self, tokens: float) -> int:
        return int(self.pool.available * BLOCK / tokens)

    def session(
        self, request: VerifierSessionRequest, policy: Policy, max_nodes: int, vocabulary: int
    ) -> VerifierSession:
        expected = self._speculation.tenant_gains.of(request.tenant)
        gain = DraftGain(expected, self._tuning.draft_gain)
        return VerifierSession(
            request,
            policy,
            max_nodes,
            vocabulary,
            self._tuning,
            chains_only=self.chains_only,
            block_verification=self._block_verification,
            draft_gain=gain,
            tenant_windows=self._windows.of(request.tenant),
        )

    def outlook(self, session: VerifierSession, sessions: int) -> Outlook:
        return self._speculation.outlook(session, sessions)

    # --- actions: called in the loop's thread -------------------------------------------------------

    def serve(
        self, session: VerifierSession, responses: ResponseQueue[Any], response_maker: ResponseMaker, timeline: Timeline
    ) -> None:
        self.enqueue(RunningSession(session, responses, response_maker, timeline=timeline))

    def enqueue(self, entry: RunningSession) -> None:
        """Queue a session for memory; EngineLostError if the engine is lost."""
        self.check_works()
        self._planner.shares.joined(entry)
        self._queue.add(entry)

    def detach(self, session: VerifierSession) -> None:
        """Forget a session in any state and free its memory. Its length feeds the forecast, even if the client ended it
        (possibly at a stop string unknown to the verifier), unless its deadline passed."""
        entry, deadline = self._queue.remove(session), session.request.deadline
        in_time = deadline is None or time.monotonic() < deadline
        if entry is not None and in_time and (tokens := session.generated - len(session.request.generated)):
            self.stats.finished(tokens, entry.had_memory, self._tuning.lifetime_smoothing)
            self._queue.lengths.add(session.generated)
        session.ngrams.gain.close()
        self._forget(session)

    # --- a step -------------------------------------------------------------------------------------

    def step(self) -> float | None:
        early, self._early = self._early, None
        wait = self._run_if_due() if early is None else self._run_early(early)
        if self._early is None:
            self.stats.step_begun = 0.0
        return wait

    def _run_if_due(self) -> float | None:
        """Run the next step and return 0. Return the seconds to wait if the step is delayed; None if no session is
        ready."""
        self._queue.admit()
        ready, on_trial = self._ready()
        if not ready:
            self._delay.end(time.monotonic())
            self._idle, self._looked_up = True, 0.0
            self._planner.idle()
            self.stats.forget_pace()
            return None  # the next action wakes the loop
        division = None
        if self._queue.memory_shares.tenants > 1 and not on_trial:
            division = self._planner.shares.divide(ready, self._threads.latency)
        if division is not None and division.sitting_out:
            waiting = set(map(id, division.sitting_out))
            ready = [entry for entry in ready if id(entry) not in waiting]
        sessions = [entry.session for entry in ready]
        for entry in ready:
            if entry.draft_ready_uncounted:
                entry.count_draft_ready(self.stats)
        self._speculation.share_threads(self._queue.running)
        batches = [] if on_trial else self._speculation.select(sessions)
        begin = time.monotonic()
        self._speculation.propose(Phase.BEFORE_DELAY, sessions)
        self._looked_up += time.monotonic() - begin
        if (delay := self._seconds_to_wait(sessions, division)) is not None:
            return delay
        self.stats.step_begun, self.stats.step_expected = time.monotonic(), 0.0
        waited = self._delay.end(self.stats.step_begun)
        proposed = self._speculation.propose(Phase.AFTER_DELAY, sessions)
        kept = self._queue.reserve_texts(ready)
        if kept:
            self._plan_and_run(kept, batches, proposed, waited, division)
        return 0.0

    def _ready(self) -> tuple[list[RunningSession], bool]:
        """Return (ready sessions, False); or ([session], True) for a session suspected of making steps fail, to be
        tried alone."""
        ready = self._queue.ready
        retried = self._retry.next([entry.session for entry in ready])
        if retried is None:
            return ready, False
        return [entry for entry in ready if entry.session is retried], True

    def _seconds_to_wait(self, sessions: Sequence[VerifierSession], division: Division | None) -> float | None:
        """Return the seconds to delay the step for candidates in flight; None: step now. A delay has to pay for every
        tenant, so there is none while a tenant sits the step out."""
        now = time.monotonic()
        drafted = [self._speculation.eligibility.uses_remote_draft(session) for session in sessions]
        self._threads.choose(drafting=any(drafted), now=now)
        if not any(drafted) or (division is not None and division.sitting_out):
            return None
        latency, break_even = self._threads.latency, self._speculation.eligibility.break_even
        return self._delay.seconds(
            sessions, drafted, now, last_step=self._last_step, latency=latency, break_even=break_even
        )

    def _plan_and_run(
        self,
        ready: list[RunningSession],
        batches: Sequence[Batch],
        proposed: ProposalStats,
        waited: float,
        division: Division | None,
    ) -> None:
        """Plan a step of the ready sessions, and run it."""
        begun = time.monotonic()
        plan = self._planner.plan(ready, proposed.seconds, division)
        if not plan.entries:  # the sessions chosen for this step were preempted, the others sit it out
            return
        self.stats.step_expected = plan.expected
        self._publisher.send_before(plan.expected, plan.sitting_out)
        self._complete(self._start_pass(plan, begun), batches, proposed, waited)

    def _run_early(self, step: _RunningStep) -> float:
        """Complete a step launched early, without the sessions that have left since."""
        plan = self._planner.begin_early(step.plan)
        if plan.entries:
            batches = self._speculation.select([entry.session for entry, _ in plan.entries])
            self._complete(step._replace(plan=plan), batches, NO_PROPOSALS, 0.0)
        return 0.0

    def _start_pass(self, plan: StepPlan, begun: float | None = None) -> _RunningStep:
        """Start the forward pass of a step that began at the time `begun`, by default now. If the launch fails, reading
        the logits raises its error."""
        pass_begun = time.monotonic()
        computing: Pass
        try:
            computing = self._launch(plan.pack())
        except Exception as error:
            computing = _FailedPass(error)
        return _RunningStep(plan, computing, pass_begun if begun is None else begun, pass_begun)

    def _complete(self, step: _RunningStep, batches: Sequence[Batch], proposed: ProposalStats, waited: float) -> None:
        """Verify a step and commit it."""
        plan, begun = step.plan, step.begun
        self.stats.mode = self._speculation.mode if batches else ""
        if batches:
            self.stats.rates = self._speculation.rates

        # 1. Wait for the forward pass and verify all trees.
        grammars_before = grammar_seconds(plan.entries)
        try:
            pack_next = partial(self._planner.pack_next, plan)
            verified = verify_step(plan.entries, step.computing, step.pass_begun, pack_next, self._speculation.observe)
        except Exception as error:
            self._drop_step(plan, error)
            return

        # 2. Commit the tokens. If the next step is certain, launch it first: the device computes it meanwhile.
        self.step_succeeded(entry.session for entry, _ in plan.entries)
        self._queue.copy_rows(verified.kv_copies)
        since = begun - proposed.seconds if self._idle else self._last_step
        end = self._last_step = time.monotonic()
        self._idle = False
        verified.hide_grammar_seconds(self._threads.latency.of(plan.rows))
        # Not a cost of rows: excluded from the latency model.
        in_grammars = grammar_seconds(plan.entries) - grammars_before
        self._early = self._launch_early(verified)
        results = verified.commit(end)
        for entry, why in verified.failed:
            entry.computing_prompt = False
            self._quarantine(entry, why)

        # 3. Update the models of cost and gain, and send the results.
        self._planner.observe(plan, end - begun - in_grammars)
        seconds = StepSeconds(verified.forward_seconds, end - begun, waited)
        self._learn(plan, results, batches, proposed, seconds, since_last=end - since)
        self._send(verified, results, seconds)

    def _drop_step(self, plan: StepPlan, error: Exception) -> None:
        """Drop a failed step as a whole, and have its sessions retried."""
        self._looked_up = 0.0
        for entry in self._queue.running:  # while sessions are retried one by one, the others wait
            self._publisher.send_pending(entry)
        self._probe.pass_failed(np.asarray(plan.written, dtype=np.int64))
        self.step_failed([entry.session for entry, _ in plan.entries], error)

    def _learn(
        self,
        plan: StepPlan,
        results: Results,
        batches: Sequence[Batch],
        proposed: ProposalStats,
        seconds: StepSeconds,
        *,
        since_last: float,
    ) -> None:
        """Update the statistics and the models of gain. `since_last`: seconds since the end of the last step; after
        idle time, since the start of this one."""
        looked_up, self._looked_up = self._looked_up, 0.0
        self._planner.shares.observe_grammars(results)
        if self._queue.memory_shares.tenants > 1:
            decoding = [entry for entry, rows in plan.entries if rows.root_row is not None and rows.count == 1]
            self._planner.shares.observe_proposers(self._speculation.shared_out(decoding, looked_up, proposed.seconds))
        added = [result for _, result in results]
        self.stats.observe(plan.rows, seconds, added, proposed.seconds + looked_up)
        in_turn = 0 if plan.division is None else len(plan.division.sitting_out)
        self.stats.observe_pace(since_last, added, texts_waited=len(plan.sitting_out) > in_turn, in_turn=in_turn)
        self._speculation.observe_drafts(plan, results)
        # A step measures a mode only if it has no prompts and brings tokens for all sessions counted when the mode was
        # selected.
        if batches and plan.decodes_only and batches[0].profile.of_step == len(results):
            self._speculation.update(batches, plan, results, seconds=since_last, proposed=proposed)
        self._speculation.share_threads(self._queue.running)

    def _send(self, verified: VerifiedStep, results: Results, seconds: StepSeconds) -> None:
        """Send a step's results, and end the sessions of complete texts."""
        for entry, _ in results:
            if entry.computing_prompt:
                entry.computing_prompt = False
                entry.timeline.event("prompt_computed")
        self._publisher.send_scores(verified.scores)
        if self._features is not None:
            self._publisher.send_features(results, self._features)
        self._publisher.publish(results, seconds)
        self._publisher.send_queries(verified.draft_queries)
        self._queue.got_tokens(results)
        for entry, result in results:
            entry.draft_ready_uncounted = self._speculation.eligibility.uses_remote_draft(entry.session)
            if result.finish:
                self._speculation.finished(entry.session)
                self.detach(entry.session)

    def _launch_early(self, verified: VerifiedStep) -> _RunningStep | None:
        """Launch the next step before this one is committed, if the device queues passes and the next step depends only
        on this one's tokens; return None otherwise. A session that arrives meanwhile waits one step longer."""
        plan = self._planner.plan_early(verified.results) if self._queues_passes and not verified.failed else None
        if plan is None:
            return None
        step = self._start_pass(plan)
        self.stats.step_begun, self.stats.step_expected = step.begun, plan.expected
        return step

    # --- sessions that leave, and failures ----------------------------------------------------------

    def _on_preempt(self, entry: RunningSession) -> None:
        """Send the pending result of a session about to be preempted, and have proposers forget the session."""
        self._publisher.send_pending(entry)
        self._forget(entry.session)
        entry.draft_ready_uncounted = False  # its next step may come long after its draft's candidates

    def _forget(self, session: VerifierSession) -> None:
        self._retry.forget(session)
        self._speculation.forget(session)

    def recover(self) -> bool:
        return self._probe.recovers()

    def end_session(self, session: VerifierSession, error: Exception) -> None:
        (entry,) = (entry for entry in self._queue.all if entry.session is session)
        self._quarantine(entry, error)

    def end_sessions(self, error: Exception) -> None:
        for entry in self._queue.all:
            self._publisher.send_pending(entry)
            self._queue.remove(entry.session)
            entry.session.ngrams.gain.close()
            self._forget(entry.session)
            entry.responses.send(error)
        self.pool.forget_prefixes()
        self._probe.sessions_ended()

    def _quarantine(self, entry: RunningSession, error: Exception) -> None:
        """End a failed session and wipe its memory: a NaN would spread to the next session that gets the blocks. If its
        grammar failed or memory was short, nothing is wiped: all logits so far were finite."""
        log.error("session_failed", exc_info=error)
        self._publisher.send_pending(entry)
        finite = isinstance(error, GrammarFailureError | ShortOfMemoryError)
        self._queue.remove(entry.session, wipe=not finite)
        entry.session.ngrams.gain.close()
        self._forget(entry.session)
        entry.responses.send(error)
