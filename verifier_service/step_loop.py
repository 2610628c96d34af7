"""The step loop: take what is ready from every session, run one forward pass, commit, again.

It runs in its own thread and owns every session and all memory. It never waits for the network: a session uses
the candidates that have arrived, and a step is put off only while waiting for more pays.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import structlog

from specdec.decoding.rows import Rows
from specdec.decoding.tree import Node
from specdec.engine.batch import Packer
from specdec.engine.blocks import BLOCK, BlockPool
from specdec.engine.engine import Engine, step_of
from specdec.serving.engine_worker import EngineWorker
from specdec.serving.outbox import Outbox
from verifier_service.attached import Attached, StepTimes
from verifier_service.guesses import Foresight
from verifier_service.own_draft import NOTHING, OwnDraft
from verifier_service.scheduling.batch_plan import ScheduledRows
from verifier_service.scheduling.cpu_threads import ThreadPolicy
from verifier_service.scheduling.prefill import PrefillSlowdown, prefill_chunks
from verifier_service.scheduling.run_queue import RunQueue
from verifier_service.scheduling.step_delay import WaitEstimate, delay_until
from verifier_service.scheduling.step_latency import StepLatency, best_prefill_rows
from verifier_service.scheduling.token_budget import WindowCosts, select_candidates
from verifier_service.session import Session
from verifier_service.shared_texts import SharedTexts
from verifier_service.speculation.controller import BatchProfile, Mode, SpeculationController
from verifier_service.stats import VerifierStats
from verifier_service.verification.result import VerifyResult
from verifier_service.verification.tree_verification import TreeVerification
from verifier_service.verification.verify_trees import verify_trees, warm_up

log = structlog.get_logger()

MOST_CANDIDATES = 256
"""Candidates of all sessions in one step; as many slots are set aside for side branches."""

MESSAGES_A_SECOND = 400
"""About so many commits are told, over all sessions: each takes the event loop a tenth of a millisecond of the
interpreter that it shares with the steps, and the steps' own cores a millisecond and a half, at the servicer, the
orchestrator and the client. Those of a drafted session are told at once, others are joined, for a
COMMIT_COALESCE_SECONDS at least. (For 0.01 seconds only, one stream of a model whose step takes a millisecond and a
half had an eighth fewer tokens.)"""

COMMIT_COALESCE_SECONDS = 0.025
"""Seconds that hardly anybody notices: commits of sessions without a draft are joined for so long."""

UNHURRIED = 0.25
"""Seconds between two commits of a session along which nobody reads."""

PRICE_SMOOTHING = 0.2
WITHOUT_DRAFT = WaitEstimate(1.0)
"""Of a session that brings one token and hopes for nothing."""

NOTHING_PAYS = 1.0
"""A price at which there is no use in drafting."""


class StepLoop(EngineWorker[Session]):
    """`step_rows`: up to which prompts fill a step, or fewer if a row costs less then; `max_unread_tokens`: tokens a
    session may be ahead of what its client has read; `shared_tokens`: of finished texts, kept for their tenant to guess
    from; `latency`: measured unless it is known; `own_draft`: guesses between steps, where that pays."""

    def __init__(
        self,
        engine: Engine,
        *,
        step_rows: int = 512,
        max_unread_tokens: int = 256,
        shared_tokens: int = 0,
        latency: StepLatency | None = None,
        controller: SpeculationController | None = None,
        own_draft: OwnDraft | None = None,
    ) -> None:
        super().__init__("step-loop", engine)
        self.stats = VerifierStats()
        self._forward = step_of(engine)
        blocks = max(2, (engine.capacity - MOST_CANDIDATES) // BLOCK)
        self.pool = BlockPool(blocks)
        self._tree_slots = list(range(blocks * BLOCK, engine.capacity))[:MOST_CANDIDATES]
        self._queue = RunQueue(engine, self.pool, self.stats, max_unread_tokens, self._on_preempt)
        slots = blocks * BLOCK
        beside = [] if own_draft is None else [own_draft.engine]
        self._threads = ThreadPolicy(engine, lambda: latency or StepLatency.measure(engine, slots), beside)
        self._step_rows = step_rows if latency is not None else best_prefill_rows(engine, slots, step_rows)
        warm_up(engine.vocabulary)
        self._controller = controller or SpeculationController()
        self._own_draft = own_draft
        self._guessing = NOTHING  # what it did for the coming step
        self._shared = SharedTexts(shared_tokens)
        self._prefill_slowdown = PrefillSlowdown()
        self._price = 0.0  # of a candidate, moving average
        self._drafted = 0  # sessions for which there is a draft
        self._last_step = 0.0  # when it ended
        self._idle = True  # whether there has been nothing to do since
        self._delayed_since: float | None = None  # since when a step is
        self._reading = False  # whether prompts have the cores that drafts would take

    @property
    def context(self) -> int:
        """Tokens that one session can have memory for at most."""
        return self.pool.usable * BLOCK

    def price_for(self, session: Session, sessions: int) -> float:
        """Of a candidate of the draft of a session that is the last of so many, as far as can be told before it has
        taken a step, and if the others are like it. Changes nothing: any thread may ask."""
        if self._threads.yields:
            return NOTHING_PAYS  # until its prompt is read: with fewer cores that would take longer
        drawn = not session.request.chooser.sampling.greedy
        batch = BatchProfile(sessions, session.policy.speculate, session.guesses, drawn, self._has_own_draft)
        if self._controller.mode_for(batch, time.monotonic()) is not Mode.REMOTE_DRAFT:
            return NOTHING_PAYS
        return select_candidates([], self._latency, sessions, 0).price

    @property
    def _latency(self) -> StepLatency:
        return self._threads.latency

    # --- actions: called in the loop's thread -------------------------------------------------------

    def attach(self, attached: Attached) -> None:
        """Let a session in as soon as there is memory for it; EngineLostError if nothing can be computed."""
        self.check_works()
        self._queue.add(attached)

    def detach(self, session: Session) -> None:
        """Forget a session and free its memory, whatever state it is in."""
        self._queue.remove(session)
        self._forget(session)

    def _on_preempt(self, attached: Attached) -> None:
        """It is about to lose its memory, at the target; then it needs none at the own draft."""
        self._tell(attached)
        self._forget(attached.session)

    def _forget(self, session: Session) -> None:
        self._retrial.forget(session)
        if self._own_draft is not None:
            self._own_draft.leave(session)

    # --- the loop -----------------------------------------------------------------------------------

    def step(self) -> float | None:
        self._queue.admit()
        ready = [a for a in self._queue.running if a.session.computable and not self._queue.throttled(a)]
        if not ready:
            self._delayed_since, self._idle = None, True
            return None  # the next action wakes the loop
        on_trial = self._retrial.next({attached.session for attached in ready})
        if on_trial is not None:
            ready = [attached for attached in ready if attached.session is on_trial]
        self._count_foreseen(ready)
        self._settle_prefill_threads()
        speculating = [a for a in ready if a.session.speculates]
        batch = self._batch_profile(ready) if speculating and on_trial is None else None
        if batch is not None:
            self._controller.select(batch, time.monotonic())
        for attached in speculating:
            drawing = attached.session.draws and self._consults(attached)  # its place is the own draft's
            if self._guesses(attached) and not attached.session.remaining_prompt and not drawing:
                attached.session.guess(self._price, self._shared.of(attached.session.request.tenant))
        now = time.monotonic()
        drafted = any(self._drafts(a) for a in speculating)
        self._threads.choose(drafting=drafted, now=now)
        if drafted and not any(a.session.remaining_prompt for a in ready):
            estimates = [a.session.wait_estimate(now, self._price) if self._drafts(a) else WITHOUT_DRAFT for a in ready]
            until = delay_until(estimates, now, self._last_step, self._latency.of(len(ready)))
            if until is not None:
                self._delayed_since = self._delayed_since or now
                return until - now
        self.stats.step_begun, self.stats.step_expected = now, 0.0
        self._consult(ready)
        self._step([attached for attached in ready if self._queue.reserve_text(attached)], batch)
        self.stats.step_begun = 0.0
        self._delayed_since = None
        return 0.0

    def _consult(self, ready: list[Attached]) -> None:
        """Have the own draft guess for the coming step."""
        self._guessing = NOTHING
        decoding = [attached for attached in ready if not attached.session.remaining_prompt]
        asked = [attached.session for attached in decoding if self._consults(attached)]
        if asked and self._own_draft is not None:
            self._guessing = self._own_draft.guess(asked, len(decoding), self._latency, self._price)

    def _step(self, ready: list[Attached], batch: BatchProfile | None) -> None:
        if not ready:
            return
        # 1. What every session adds to the batch.
        start = time.monotonic()
        waited = start - self._delayed_since if self._delayed_since else 0.0
        packer = self._engine.packer()
        planned = self._plan(packer, ready)
        rows = len(packer.tokens)
        self.stats.step_expected = self._latency.of(rows)

        # 2. One forward pass, one walk.
        try:
            forward_start = time.monotonic()
            verifications = [(a, TreeVerification(a.session, p)) for a, p in planned if p.root_row is not None]
            logits = self._forward(
                packer.pack(), lambda: dict(ask for _, verification in verifications for ask in verification.asks())
            )
            forward_time = time.monotonic() - forward_start
            verify_trees([verification for _, verification in verifications], logits)
            self._look([verification for _, verification in verifications if verification.error is None], logits)
        except Exception as error:  # nothing of the step counts; its sessions are tried again
            self.step_failed(
                [attached.session for attached, _ in planned], np.asarray(packer.slots, dtype=np.int64), error
            )
            return

        # 3. Commit: keep what was accepted, tell everybody.
        for attached, piece in planned:
            self._retrial.forget(attached.session)
            if piece.root_row is None:
                attached.session.computed += piece.count
        kept = [(a, verification) for a, verification in verifications if verification.error is None]
        self._queue.copy_rows([move for _, verification in kept for move in verification.kv_copies])
        self._add_logprobs([verification for _, verification in kept], logits)
        begin = start - self._guessing.seconds if self._idle else self._last_step
        end = self._last_step = time.monotonic()
        self._idle = False
        results = [(attached, attached.session.apply(verification, end)) for attached, verification in kept]
        for attached, _ in kept:  # a prompt that is not through yet may still turn out to be no numbers
            attached.session.publish()
        for attached, verification in verifications:
            if verification.error is not None:
                self._quarantine(attached, verification.error)
        if any(piece.root_row is None for _, piece in planned):
            self._prefill_slowdown.observe(self._latency.of(rows), end - start)
        self._observe(rows, end - start, results)
        # A step with prompts in it, or the ends of some, tells nothing of speculation.
        if batch is not None and all(piece.root_row is not None and piece.count == 1 for _, piece in planned):
            self._watch(batch, rows, end - begin, results)
        self._deliver(results, forward_time, end - start, waited)

    def _plan(self, packer: Packer, ready: list[Attached]) -> list[tuple[Attached, ScheduledRows]]:
        """Rows of all: the tips of those who decode, the candidates that pay, pieces of prompts."""
        prompts, plain, speculating = [], [], []
        for attached in ready:
            if attached.session.remaining_prompt:
                prompts.append(attached)
            elif self._drafts(attached) or self._guesses(attached):
                speculating.append(attached)
            else:
                plain.append(attached)
        decoding = len(plain) + len(speculating)
        tree_slots = list(self._tree_slots)
        offers = [attached.session.offers() for attached in speculating]
        chosen, price = select_candidates(offers, self._latency, decoding, len(tree_slots), self._guessing.seconds)
        if decoding:
            self._price += PRICE_SMOOTHING * (min(price, NOTHING_PAYS) - self._price)
        foresights = self._look_ahead(speculating, chosen, decoding)
        planned: list[tuple[Attached, ScheduledRows]] = []
        for attached, nodes, foresight in zip(speculating, chosen, foresights, strict=True):
            self._queue.reserve_candidates(attached.session, nodes)
            planned.append((attached, attached.session.plan(packer, 1, nodes, tree_slots, foresight)))
        for attached in (*plain, *prompts):
            attached.session.guesser.look_away()
        planned += [(attached, attached.session.plan(packer, 1, [], tree_slots)) for attached in plain]
        remaining = [a.session.computable for a in prompts]
        rows, slowdown = len(packer.tokens), self._prefill_slowdown.factor
        shares = prefill_chunks(remaining, decoding, self._latency, rows, self._step_rows, slowdown)
        for attached, share in zip(prompts, shares, strict=True):
            planned.append((attached, attached.session.plan(packer, share, [], tree_slots)))
        return planned

    def _look_ahead(
        self, speculating: list[Attached], chosen: list[list[Node]], decoding: int
    ) -> list[Foresight | None]:
        """The lookahead windows of a step of so many `decoding`, which is to hold the `chosen` candidates; a Jacobi
        window's join them."""
        taken = sum(map(len, chosen))
        free = len(self._tree_slots) - taken
        prices = WindowCosts(decoding, self._latency, decoding + taken)
        foresights: list[Foresight | None] = []
        for attached, nodes in zip(speculating, chosen, strict=True):
            session, size = attached.session, None
            if self._guesses(attached):
                size = session.policy.lookahead
                if size is None and not self._consults(attached):  # a draft leaves a window little to find
                    size = prices.affordable(session.guesser.sizes, session.guesser.gain)
            if size is not None and size.most_rows > free:
                size = None
            foresight = session.look_ahead(size)
            foresights.append(foresight)
            if foresight is not None:
                planned = {id(node) for node in nodes}
                nodes += [node for node in foresight.candidates if id(node) not in planned]
                prices.add(len(foresight.nodes))
                free -= len(foresight.nodes)
        return foresights

    def _look(self, verifications: list[TreeVerification], logits: Rows) -> None:
        """Tell the windows what the target chooses below them."""
        looking = [verification for verification in verifications if verification.lookahead_count]
        if not looking:
            return
        rows, asks = zip(
            *(asked for verification in looking for asked in verification.lookahead_queries()), strict=True
        )
        chosen = iter(logits.choose(rows, asks)[0].tolist())
        for verification in looking:
            tokens = list(itertools.islice(chosen, verification.lookahead_count))
            verification.session.guesser.looked(tokens, len(verification.result.tokens))

    # --- who speculates -----------------------------------------------------------------------------

    def _drafts(self, attached: Attached) -> bool:
        """Whether it is worth its draft's while. CONTRASTIVE needs it in any case."""
        if not attached.session.policy.speculate:
            return False
        return (self._controller.mode is Mode.REMOTE_DRAFT and not self._reading) or self._unguarded(attached)

    def _guesses(self, attached: Attached) -> bool:
        """Whether it may have candidates of the verifier's own."""
        return attached.session.guesses and (self._controller.mode is not Mode.OFF or self._insists(attached))

    def _consults(self, attached: Attached) -> bool:
        """Whether the verifier's own draft guesses for it. Who asks for a window gets that."""
        own, session = self._own_draft, attached.session
        wanted = session.guesses and self._controller.mode is Mode.LOCAL_DRAFT and session.policy.lookahead is None
        return wanted and own is not None and own.serves(session)

    @property
    def _has_own_draft(self) -> bool:
        return self._own_draft is not None and self._own_draft.works

    def _unguarded(self, attached: Attached) -> bool:
        return attached.session.policy.always or attached.session.contrasts

    def _insists(self, attached: Attached) -> bool:
        """Whether it speculates whatever the controller finds, which learns nothing of such steps."""
        return self._unguarded(attached) or attached.session.policy.lookahead is not None

    def _batch_profile(self, attached: list[Attached]) -> BatchProfile | None:
        """Those of a step, some of which speculate, for the controller; None if it has no say."""
        batch = BatchProfile(
            len(attached),
            remote_draft=any(a.session.policy.speculate for a in attached),
            ngram=any(a.session.guesses for a in attached),
            sampled=2 * sum(not a.session.request.chooser.sampling.greedy for a in attached) > len(attached),
            local_draft=self._has_own_draft,
        )
        return None if any(self._insists(a) for a in attached) else batch

    def _settle_prefill_threads(self) -> None:
        """Prompts, while more of them are read than texts go on: drafts would have them take twice as long."""
        if self._threads.yields:
            reading = sum(bool(attached.session.remaining_prompt) for attached in self._queue.running)
            self._reading = 2 * reading > len(self._queue.running)

    # --- results ------------------------------------------------------------------------------------

    def _add_logprobs(self, verifications: list[TreeVerification], logits: Rows) -> None:
        asking = [verification for verification in verifications if verification.session.request.logprobs]
        if not asking:
            return
        rows = [row for verification in asking for row in verification.rows]
        tokens = np.asarray([token for verification in asking for token in verification.result.tokens])
        tops = [verification.session.request.logprobs - 1 for verification in asking for _ in verification.rows]
        found = iter(logits.logprobs(rows, tokens, tops))
        for verification in asking:
            verification.result.logprobs = list(itertools.islice(found, len(verification.rows)))

    def _deliver(
        self, results: list[tuple[Attached, VerifyResult]], forward: float, step: float, waited: float
    ) -> None:
        now = time.monotonic()
        self._drafted = sum(attached.session.policy.speculate for attached in self._queue.running)
        self._settle_prefill_threads()
        spacing = max(COMMIT_COALESCE_SECONDS, len(self._queue.running) / MESSAGES_A_SECOND)
        messages = []
        for attached, result in results:
            attached.decided = attached.session.policy.speculate
            if attached.untold is None:
                attached.untold = result
            else:
                attached.untold.join(result)
            pause = max(spacing, UNHURRIED) if attached.session.request.unhurried else spacing
            if result.finish or now - attached.told >= pause or self._awaited(attached):
                messages.append(self._message(attached, forward, step, waited))
            if result.finish:
                self._shared.add(attached.session.request.tenant, attached.session.tree.committed)
                self.stats.lifetime += 0.1 * (now - attached.let_in - self.stats.lifetime)
                self.detach(attached.session)
        Outbox.put_all(messages)

    def _awaited(self, attached: Attached) -> bool:
        """Whether somebody waits for its verdict: its draft, for what to guess next; the next step, for that draft; or,
        where it is stalled, it itself, for its reader."""
        wanted = attached.price < NOTHING_PAYS or self._drafts(attached)  # candidates; or so its draft thinks
        return wanted or not attached.session.computable or self._queue.throttled(attached)

    def _tell(self, attached: Attached) -> None:
        """At once, outside of any step, if there is something to tell."""
        if attached.untold is not None:
            Outbox.put_all([self._message(attached)])

    def _message(
        self, attached: Attached, forward: float = 0.0, step: float = 0.0, waited: float = 0.0
    ) -> tuple[Outbox[Any], Callable[[], Any]]:
        """What is untold of a session, to be put into its outbox."""
        found, attached.session.found = attached.session.found, 0
        attached.price = self._price if self._drafts(attached) else NOTHING_PAYS
        times = StepTimes(
            forward,
            step,
            waited,
            attached.queued,
            found,
            attached.preemptions,
            attached.price,
            self._drafted,
            attached.session.draft_timing.round_trip,
        )
        result, attached.untold = attached.untold, None
        attached.queued, attached.told = 0.0, time.monotonic()
        assert result is not None
        return attached.outbox, partial(attached.message, result, times)

    def _observe(self, rows: int, seconds: float, results: list[tuple[Attached, VerifyResult]]) -> None:
        self._threads.observe(rows, seconds)
        stats = self.stats
        stats.steps += 1
        stats.rows += rows
        stats.busy += seconds
        for _, result in results:
            stats.committed += len(result.tokens)
            stats.drafted += result.offered
            stats.accepted += result.accepted

    def _watch(
        self, batch: BatchProfile, rows: int, seconds: float, results: list[tuple[Attached, VerifyResult]]
    ) -> None:
        """Tell the controller what a step of a batch has brought in `seconds`. A step that lost sessions tells
        nothing."""
        before, sessions = self._controller.mode, len(results)
        if batch.sessions != sessions:
            return
        self._controller.update(
            batch,
            speculated=rows > sessions or self._threads.yielding or self._guessing.sessions > 0,
            tokens=sum(len(result.tokens) for _, result in results),
            seconds=seconds,
            plain_rate=sessions / self._threads.plain_latency.of(sessions),
        )
        if self._controller.mode is not before:
            log.debug("mode_changed", mode=self._controller.mode.value, before=before.value, sessions=sessions)

    def _count_foreseen(self, ready: list[Attached]) -> None:
        """What came while the last step was under way is in place; nothing has been waited for yet."""
        for attached in ready:
            if attached.decided:
                self.stats.outcomes += 1
                self.stats.foreseen += attached.session.drafted
                attached.decided = False

    # --- failures -----------------------------------------------------------------------------------

    def end_session(self, session: Session, error: Exception) -> None:
        (attached,) = (each for each in self._queue.all if each.session is session)
        self._quarantine(attached, error)

    def end_sessions(self, error: Exception) -> None:
        for attached in self._queue.all:
            self._tell(attached)
            self.detach(attached.session)
            attached.outbox.put(error)
        self.pool.forget_prefixes()

    def _quarantine(self, attached: Attached, error: Exception) -> None:
        """End a session that failed, and wipe its memory: a NaN in it would spread to whoever gets it next."""
        log.error("session_failed", exc_info=error)
        self._tell(attached)
        self._queue.remove(attached.session, wipe=True)
        self._forget(attached.session)
        attached.outbox.put(error)
