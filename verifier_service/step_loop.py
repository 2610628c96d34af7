"""The step loop: takes rows of all sessions that are ready, runs one forward pass, commits tokens, and starts again.

It runs in its own thread and owns every session and all memory. It never blocks on the network: a session uses the
candidates that have arrived, and a step is delayed only while waiting for more of them pays.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import structlog

from specdec.decoding.step_logits import StepLogits
from specdec.decoding.tree import Node
from specdec.engine.batch import Packer
from specdec.engine.engine import Engine, step_of
from specdec.engine.kv.blocks import BLOCK, BlockPool
from specdec.serving.engine_worker import EngineWorker
from specdec.serving.response_queue import ResponseQueue
from verifier_service.proposers.draft_model import NO_PROPOSALS, DraftModelProposer
from verifier_service.proposers.ngram import LookaheadRows
from verifier_service.proposers.suffix_cache import SuffixCache
from verifier_service.running_session import RunningSession, StepTimes
from verifier_service.scheduling.batch_plan import ScheduledRows
from verifier_service.scheduling.cpu_threads import ThreadPolicy
from verifier_service.scheduling.prefill import PrefillSlowdown, prefill_chunks
from verifier_service.scheduling.run_queue import RunQueue
from verifier_service.scheduling.step_delay import WaitEstimate, delay_until
from verifier_service.scheduling.step_latency import StepLatency, best_prefill_rows
from verifier_service.scheduling.token_budget import WindowCosts, select_candidates
from verifier_service.session import Session
from verifier_service.speculation.controller import BatchProfile, Mode, SpeculationController
from verifier_service.stats import VerifierStats
from verifier_service.verification.result import VerifyResult
from verifier_service.verification.tree_verification import TreeVerification
from verifier_service.verification.verify_trees import verify_trees, warm_up

log = structlog.get_logger()

MOST_CANDIDATES = 256
"""Most candidates of all sessions in one step; as many slots are set aside as tree slots."""

MESSAGES_A_SECOND = 400
"""Commits a second, about, that are sent over all sessions. Each takes 0.1 ms of the interpreter, which the event loop
shares with the steps, and 1.5 ms of the CPU cores that compute them, at servicer, orchestrator and client. Commits that
somebody waits for are sent at once; others are joined for COMMIT_COALESCE_SECONDS at least. (With 0.01 s, one stream of
a model whose step takes 1.5 ms had an eighth fewer tokens.)"""

COMMIT_COALESCE_SECONDS = 0.025
"""Least seconds between two commits of a session that nobody waits for; hardly any reader notices them."""

RELAXED_COALESCE_SECONDS = 0.25
"""Least seconds between two such commits of a session whose request has `coalesce_commits`: nobody reads along."""

PRICE_SMOOTHING = 0.2
WITHOUT_DRAFT = WaitEstimate(1.0)
"""The wait estimate of a session that brings one token and waits for nothing."""


class StepLoop(EngineWorker[Session]):
    """The step loop of a verifier.

    `step_rows`: rows up to which prompts fill a step, or fewer if a row costs less then; `max_unread_tokens`: tokens
    that a session may be ahead of what its client has read; `suffix_cache_tokens`: tokens of finished texts that are
    kept for each tenant; `latency`: of the target's steps, measured if not given; `draft_model`: the local draft.
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
    ) -> None:
        super().__init__("step-loop", engine)
        self.stats = VerifierStats()
        self._forward = step_of(engine)
        blocks = max(2, (engine.capacity - MOST_CANDIDATES) // BLOCK)
        self.pool = BlockPool(blocks)
        self._tree_slots = list(range(blocks * BLOCK, engine.capacity))[:MOST_CANDIDATES]
        self._queue = RunQueue(engine, self.pool, self.stats, max_unread_tokens, self._on_preempt)
        slots = blocks * BLOCK
        beside = [] if draft_model is None else [draft_model.engine]
        self._threads = ThreadPolicy(engine, lambda: latency or StepLatency.measure(engine, slots), beside)
        self._step_rows = step_rows if latency is not None else best_prefill_rows(engine, slots, step_rows)
        warm_up(engine.vocabulary)
        self._controller = controller or SpeculationController()
        self._draft_model = draft_model
        self._proposed = NO_PROPOSALS  # the local draft's work for the coming step
        self._suffix_cache = SuffixCache(suffix_cache_tokens)
        self._prefill_slowdown = PrefillSlowdown()
        self._price = 0.0  # the break-even probability, moving average
        self._drafted = 0  # running sessions that have a remote draft
        self._last_step = 0.0  # when the last step ended
        self._idle = True  # there has been nothing to do since then
        self._delayed_since: float | None = None  # when the delay of the coming step began
        self._prefilling = False  # prompts use the CPU cores that drafts would take

    @property
    def context(self) -> int:
        """The number of tokens that one session can have memory for at most."""
        return self.pool.usable * BLOCK

    def drafting_outlook(self, session: Session, sessions: int) -> tuple[bool, float]:
        """Return (True if candidates of a remote draft are wanted, the break-even probability) for a new session.

        It is an estimate before the session's first step, with `sessions` sessions that are all like it. Changes
        nothing: any thread may ask.
        """
        if self._threads.yields:
            return False, self._price  # until its prompt is read: with fewer threads that would take longer
        drawn = not session.request.sampler.sampling.greedy
        batch = BatchProfile(
            sessions, session.policy.remote, session.takes_own_candidates, drawn, self._has_local_draft
        )
        if self._controller.mode_for(batch, time.monotonic()) is not Mode.REMOTE_DRAFT:
            return False, self._price
        price = min(1.0, select_candidates([], self._latency, sessions, 0).price)
        return price < 1.0, price

    @property
    def _latency(self) -> StepLatency:
        return self._threads.latency

    # --- actions: called in the loop's thread -------------------------------------------------------

    def attach(self, entry: RunningSession) -> None:
        """Queue a session for memory; EngineLostError if nothing can be computed."""
        self.check_works()
        self._queue.add(entry)

    def detach(self, session: Session) -> None:
        """Forget a session and free its memory, whatever state it is in."""
        self._queue.remove(session)
        self._forget(session)

    def _on_preempt(self, entry: RunningSession) -> None:
        """Send what is pending of a session that is about to lose its memory; free its memory at the local draft."""
        self._send_pending(entry)
        self._forget(entry.session)

    def _forget(self, session: Session) -> None:
        self._retry.forget(session)
        if self._draft_model is not None:
            self._draft_model.leave(session)

    # --- the loop -----------------------------------------------------------------------------------

    def step(self) -> float | None:
        self._queue.admit()
        ready = [a for a in self._queue.running if a.session.computable and not self._queue.throttled(a)]
        if not ready:
            self._delayed_since, self._idle = None, True
            return None  # the next action wakes the loop
        suspect = self._retry.next({entry.session for entry in ready})
        if suspect is not None:
            ready = [entry for entry in ready if entry.session is suspect]
        self._count_ready(ready)
        self._settle_prefill_threads()
        speculating = [a for a in ready if a.session.speculates]
        batch = self._batch_profile(ready) if speculating and suspect is None else None
        if batch is not None:
            self._controller.select(batch, time.monotonic())
        for entry in speculating:
            drawing = entry.session.samples_candidates and self._uses_local_draft(entry)  # its child is the draft's
            if self._uses_ngrams(entry) and not entry.session.remaining_prompt and not drawing:
                entry.session.propose_ngrams(self._price, self._suffix_cache.tokens_of(entry.session.request.tenant))
        now = time.monotonic()
        drafted = any(self._uses_remote_draft(a) for a in speculating)
        self._threads.choose(drafting=drafted, now=now)
        if drafted and not any(a.session.remaining_prompt for a in ready):
            estimates = [
                a.session.wait_estimate(now, self._price) if self._uses_remote_draft(a) else WITHOUT_DRAFT
                for a in ready
            ]
            until = delay_until(estimates, now, self._last_step, self._latency.of(len(ready)))
            if until is not None:
                self._delayed_since = self._delayed_since or now
                return until - now
        self.stats.step_begun, self.stats.step_expected = now, 0.0
        self._run_draft_model(ready)
        self._run_step([entry for entry in ready if self._queue.reserve_text(entry)], batch)
        self.stats.step_begun = 0.0
        self._delayed_since = None
        return 0.0

    def _run_draft_model(self, ready: list[RunningSession]) -> None:
        """Let the local draft propose candidates for the coming step."""
        self._proposed = NO_PROPOSALS
        decoding = [entry for entry in ready if not entry.session.remaining_prompt]
        asked = [entry.session for entry in decoding if self._uses_local_draft(entry)]
        if asked and self._draft_model is not None:
            self._proposed = self._draft_model.guess(asked, len(decoding), self._latency, self._price)

    def _run_step(self, ready: list[RunningSession], batch: BatchProfile | None) -> None:
        if not ready:
            return
        # 1. Collect every session's rows.
        start = time.monotonic()
        waited = start - self._delayed_since if self._delayed_since else 0.0
        packer = self._engine.packer()
        planned = self._plan(packer, ready)
        rows = len(packer.tokens)
        self.stats.step_expected = self._latency.of(rows)

        # 2. Run one forward pass, and verify all trees.
        try:
            forward_start = time.monotonic()
            verifications = [(a, TreeVerification(a.session, p)) for a, p in planned if p.root_row is not None]
            logits = self._forward(
                packer.pack(),
                lambda: dict(query for _, verification in verifications for query in verification.queries()),
            )
            forward_time = time.monotonic() - forward_start
            verify_trees([verification for _, verification in verifications], logits)
            self._observe_windows(
                [verification for _, verification in verifications if verification.error is None], logits
            )
        except Exception as error:  # nothing of the step counts; its sessions are tried again
            self.step_failed([entry.session for entry, _ in planned], np.asarray(packer.slots, dtype=np.int64), error)
            return

        # 3. Commit: keep what was accepted, and send the results.
        for entry, piece in planned:
            self._retry.forget(entry.session)
            if piece.root_row is None:
                entry.session.computed += piece.count
        kept = [(a, verification) for a, verification in verifications if verification.error is None]
        self._queue.copy_rows([move for _, verification in kept for move in verification.kv_copies])
        self._add_logprobs([verification for _, verification in kept], logits)
        begin = start - self._proposed.seconds if self._idle else self._last_step
        end = self._last_step = time.monotonic()
        self._idle = False
        results = [(entry, entry.session.apply(verification, end)) for entry, verification in kept]
        for entry, _ in kept:  # not of unfinished prompts: whether their logits are finite is not known yet
            entry.session.cache_prefix()
        for entry, verification in verifications:
            if verification.error is not None:
                self._quarantine(entry, verification.error)
        if any(piece.root_row is None for _, piece in planned):
            self._prefill_slowdown.observe(self._latency.of(rows), end - start)
        self._observe(rows, end - start, results)
        # A step with prompts in it, or the ends of some, says nothing about speculation.
        if batch is not None and all(piece.root_row is not None and piece.count == 1 for _, piece in planned):
            self._update_controller(batch, rows, end - begin, results)
        self._publish(results, forward_time, end - start, waited)

    def _plan(self, packer: Packer, ready: list[RunningSession]) -> list[tuple[RunningSession, ScheduledRows]]:
        """Add the rows of all sessions: the roots of those that decode, candidates that pay, windows, prompt chunks."""
        prompts, plain, speculating = [], [], []
        for entry in ready:
            if entry.session.remaining_prompt:
                prompts.append(entry)
            elif self._uses_remote_draft(entry) or self._uses_ngrams(entry):
                speculating.append(entry)
            else:
                plain.append(entry)
        decoding = len(plain) + len(speculating)
        tree_slots = list(self._tree_slots)
        offers = [entry.session.candidates() for entry in speculating]
        chosen, price = select_candidates(offers, self._latency, decoding, len(tree_slots), self._proposed.seconds)
        if decoding:
            self._price += PRICE_SMOOTHING * (min(price, 1.0) - self._price)
        windows = self._open_windows(speculating, chosen, decoding)
        planned: list[tuple[RunningSession, ScheduledRows]] = []
        for entry, nodes, window in zip(speculating, chosen, windows, strict=True):
            self._queue.reserve_candidates(entry.session, nodes)
            planned.append((entry, entry.session.plan(packer, 1, nodes, tree_slots, window)))
        for entry in (*plain, *prompts):
            entry.session.ngrams.close_window()
        planned += [(entry, entry.session.plan(packer, 1, [], tree_slots)) for entry in plain]
        remaining = [a.session.computable for a in prompts]
        rows, slowdown = len(packer.tokens), self._prefill_slowdown.factor
        shares = prefill_chunks(remaining, decoding, self._latency, rows, self._step_rows, slowdown)
        for entry, share in zip(prompts, shares, strict=True):
            planned.append((entry, entry.session.plan(packer, share, [], tree_slots)))
        return planned

    def _open_windows(
        self, speculating: list[RunningSession], chosen: list[list[Node]], decoding: int
    ) -> list[LookaheadRows | None]:
        """Open the lookahead windows of a step with `decoding` sessions and the `chosen` candidates, to which a Jacobi
        window's candidates are added. One entry for each speculating session."""
        taken = sum(map(len, chosen))
        free = len(self._tree_slots) - taken
        prices = WindowCosts(decoding, self._latency, decoding + taken)
        windows: list[LookaheadRows | None] = []
        for entry, nodes in zip(speculating, chosen, strict=True):
            session, size = entry.session, None
            if session.policy.windows and self._uses_ngrams(entry):
                size = session.policy.lookahead
                if size is None and not self._uses_local_draft(entry):  # with a draft a window has little to gain
                    size = prices.affordable(session.ngrams.sizes, session.ngrams.gain)
            if size is not None and size.most_rows > free:
                size = None
            window = session.open_window(size)
            windows.append(window)
            if window is not None:
                planned = {id(node) for node in nodes}
                nodes += [node for node in window.candidates if id(node) not in planned]
                prices.add(len(window.nodes))
                free -= len(window.nodes)
        return windows

    def _observe_windows(self, verifications: list[TreeVerification], logits: StepLogits) -> None:
        """Add the target's choices below the windows' rows to the windows."""
        looking = [verification for verification in verifications if verification.lookahead_count]
        if not looking:
            return
        rows, queries = zip(
            *(asked for verification in looking for asked in verification.lookahead_queries()), strict=True
        )
        chosen = iter(logits.choose(rows, queries)[0].tolist())
        for verification in looking:
            tokens = list(itertools.islice(chosen, verification.lookahead_count))
            verification.session.ngrams.observe_window(tokens, len(verification.result.tokens))

    # --- who speculates -----------------------------------------------------------------------------

    def _uses_remote_draft(self, entry: RunningSession) -> bool:
        """True if the session uses candidates of its remote draft now. CONTRASTIVE always needs them."""
        if not entry.session.policy.remote:
            return False
        return (self._controller.mode is Mode.REMOTE_DRAFT and not self._prefilling) or self._is_exempt(entry)

    def _uses_ngrams(self, entry: RunningSession) -> bool:
        """True if the session may have candidates of proposers now."""
        return entry.session.takes_own_candidates and (self._controller.mode is not Mode.OFF or self._is_forced(entry))

    def _uses_local_draft(self, entry: RunningSession) -> bool:
        """True if the local draft proposes for the session now. One whose request asks for a window has only that."""
        own, session = self._draft_model, entry.session
        wanted = (
            session.takes_own_candidates
            and session.policy.local_model
            and self._controller.mode is Mode.LOCAL_DRAFT
            and session.policy.lookahead is None
        )
        return wanted and own is not None and own.serves(session)

    @property
    def _has_local_draft(self) -> bool:
        return self._draft_model is not None and self._draft_model.works

    def _is_exempt(self, entry: RunningSession) -> bool:
        return entry.session.policy.forced or entry.session.needs_draft

    def _is_forced(self, entry: RunningSession) -> bool:
        """True if the session speculates whatever the controller finds, which learns nothing from such steps."""
        return self._is_exempt(entry) or entry.session.policy.lookahead is not None

    def _batch_profile(self, entry: list[RunningSession]) -> BatchProfile | None:
        """Return the batch profile of a step's sessions, some of which speculate; None if the controller has no say."""
        batch = BatchProfile(
            len(entry),
            remote_draft=any(a.session.policy.remote for a in entry),
            ngram=any(a.session.takes_own_candidates for a in entry),
            sampled=2 * sum(not a.session.request.sampler.sampling.greedy for a in entry) > len(entry),
            local_draft=self._has_local_draft,
        )
        return None if any(self._is_forced(a) for a in entry) else batch

    def _settle_prefill_threads(self) -> None:
        """Decide whether prompts get the CPU cores that drafts would take: they do while most running sessions prefill,
        since beside drafts prompts would take twice as long."""
        if self._threads.yields:
            reading = sum(bool(entry.session.remaining_prompt) for entry in self._queue.running)
            self._prefilling = 2 * reading > len(self._queue.running)

    # --- results ------------------------------------------------------------------------------------

    def _add_logprobs(self, verifications: list[TreeVerification], logits: StepLogits) -> None:
        asking = [
            verification for verification in verifications if verification.session.request.top_logprobs is not None
        ]
        if not asking:
            return
        rows = [row for verification in asking for row in verification.rows]
        tokens = np.asarray([token for verification in asking for token in verification.result.tokens])
        tops = [verification.session.request.top_logprobs or 0 for verification in asking for _ in verification.rows]
        found = iter(logits.logprobs(rows, tokens, tops))
        for verification in asking:
            verification.result.logprobs = list(itertools.islice(found, len(verification.rows)))

    def _publish(
        self, results: list[tuple[RunningSession, VerifyResult]], forward: float, step: float, waited: float
    ) -> None:
        now = time.monotonic()
        self._drafted = sum(entry.session.policy.remote for entry in self._queue.running)
        self._settle_prefill_threads()
        spacing = max(COMMIT_COALESCE_SECONDS, len(self._queue.running) / MESSAGES_A_SECOND)
        messages = []
        for entry, result in results:
            entry.awaiting_draft = entry.session.policy.remote
            if entry.pending_result is None:
                entry.pending_result = result
            else:
                entry.pending_result.join(result)
            pause = max(spacing, RELAXED_COALESCE_SECONDS) if entry.session.request.coalesce_commits else spacing
            if result.finish or now - entry.last_sent_at >= pause or self._is_awaited(entry):
                messages.append(self._message(entry, forward, step, waited))
            if result.finish:
                self._suffix_cache.add(entry.session.request.tenant, entry.session.tree.committed)
                self.stats.lifetime += 0.1 * (now - entry.admitted_at - self.stats.lifetime)
                self.detach(entry.session)
        ResponseQueue.send_all(messages)

    def _is_awaited(self, entry: RunningSession) -> bool:
        """True if somebody waits for the session's verify result: its draft, which needs it to go on; the next step,
        which needs that draft; or its reader, if the session is throttled."""
        wanted = entry.drafting_wanted or self._uses_remote_draft(entry)  # now, or as its draft was last told
        return wanted or not entry.session.computable or self._queue.throttled(entry)

    def _send_pending(self, entry: RunningSession) -> None:
        """Send what is pending at once, outside of any step."""
        if entry.pending_result is not None:
            ResponseQueue.send_all([self._message(entry)])

    def _message(
        self, entry: RunningSession, forward: float = 0.0, step: float = 0.0, waited: float = 0.0
    ) -> tuple[ResponseQueue[Any], Callable[[], Any]]:
        """Return a session's response queue and a function that makes the commit of its pending result."""
        found, entry.session.cached_tokens = entry.session.cached_tokens, 0
        entry.drafting_wanted = self._uses_remote_draft(entry) and self._price < 1.0
        times = StepTimes(
            forward,
            step,
            waited,
            entry.queued,
            found,
            entry.preemptions,
            entry.drafting_wanted,
            self._price,
            self._drafted,
            entry.session.draft_timing.round_trip,
        )
        result, entry.pending_result = entry.pending_result, None
        entry.queued, entry.last_sent_at = 0.0, time.monotonic()
        assert result is not None
        return entry.responses, partial(entry.message, result, times)

    def _observe(self, rows: int, seconds: float, results: list[tuple[RunningSession, VerifyResult]]) -> None:
        self._threads.observe(rows, seconds)
        stats = self.stats
        stats.steps += 1
        stats.rows += rows
        stats.busy += seconds
        for _, result in results:
            stats.committed += len(result.tokens)
            stats.drafted += result.offered
            stats.accepted += result.accepted

    def _update_controller(
        self, batch: BatchProfile, rows: int, seconds: float, results: list[tuple[RunningSession, VerifyResult]]
    ) -> None:
        """Update the controller with the tokens that a step of a batch brought in `seconds`. A step that lost sessions
        does not count."""
        before, sessions = self._controller.mode, len(results)
        if batch.sessions != sessions:
            return
        self._controller.update(
            batch,
            speculated=rows > sessions or self._threads.yielding or self._proposed.sessions > 0,
            tokens=sum(len(result.tokens) for _, result in results),
            seconds=seconds,
            plain_rate=sessions / self._threads.plain_latency.of(sessions),
        )
        if self._controller.mode is not before:
            log.debug("mode_changed", mode=self._controller.mode.value, before=before.value, sessions=sessions)

    def _count_ready(self, ready: list[RunningSession]) -> None:
        """Count the sessions that have a draft, and those whose next candidates came while the last step was under way:
        the coming step has not been delayed yet."""
        for entry in ready:
            if entry.awaiting_draft:
                self.stats.drafted_steps += 1
                self.stats.draft_ready_steps += entry.session.has_draft_candidates
                entry.awaiting_draft = False

    # --- failures -----------------------------------------------------------------------------------

    def end_session(self, session: Session, error: Exception) -> None:
        (entry,) = (entry for entry in self._queue.all if entry.session is session)
        self._quarantine(entry, error)

    def end_sessions(self, error: Exception) -> None:
        for entry in self._queue.all:
            self._send_pending(entry)
            self.detach(entry.session)
            entry.responses.send(error)
        self.pool.forget_prefixes()

    def _quarantine(self, entry: RunningSession, error: Exception) -> None:
        """End a session that failed, and wipe its memory: a NaN in it would spread to the session that gets it next."""
        log.error("session_failed", exc_info=error)
        self._send_pending(entry)
        self._queue.remove(entry.session, wipe=True)
        self._forget(entry.session)
        entry.responses.send(error)
