"""The step loop: take what is ready from every session, run one forward pass, commit, again.

It runs in its own thread and owns every session and all memory. It never waits for the network: a session uses
the candidates that have arrived, and a step is put off only while waiting for more pays.
"""

from __future__ import annotations

import itertools
import time
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import structlog

from specdec.decoding.rows import Rows
from specdec.decoding.tree import Node
from specdec.engine.batch import Packer
from specdec.engine.blocks import BLOCK, BlockPool
from specdec.engine.engine import Engine, step_of
from specdec.engine.kv import NOWHERE, PoolFullError, Slots
from specdec.serving.outbox import Outbox
from specdec.serving.worker import Worker
from verifier_service.cores import Cores
from verifier_service.cost import StepCost
from verifier_service.guard import Crowd, Guard, Way
from verifier_service.guesses import Foresight
from verifier_service.pace import Prospect, wait_until
from verifier_service.schedule import candidates, prompt_rows, window_size
from verifier_service.session import Descent, Planned, Session, Verdict
from verifier_service.shared_texts import SharedTexts
from verifier_service.walk import walk, warm_up

log = structlog.get_logger()

MOST_CANDIDATES = 256
"""Candidates of all sessions in one step; as many slots are set aside for side branches."""

MESSAGES_A_SECOND = 400
"""About so many commits are told, over all sessions: each takes the event loop a tenth of a millisecond of the
interpreter that it shares with the steps. Those of a drafted session are told at once, others are joined."""

BLINK = 0.025
"""Seconds between two commits of a session at least, but for a drafted one: each takes the steps' own cores a
millisecond and a half, at the servicer, the orchestrator and the client, and nobody reads faster. (With 0.01 one stream
of a model whose step takes a millisecond and a half had an eighth fewer tokens a second.)"""

UNHURRIED = 0.25
"""Seconds between two commits of a session along which nobody reads."""

PRICE_SMOOTHING = 0.2
UNDRAFTED = Prospect(1.0)
"""Of a session that brings one token and hopes for nothing."""

NOTHING_PAYS = 1.0
"""A price at which there is no use in drafting."""

MARGIN = 16
"""A session is let in only if this part of all blocks, or one for each running session, stays available."""


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step, and what one session went through before it."""

    forward: float
    step: float
    waited: float  # for candidates
    queued: float  # for memory, since its last commit
    found: int = 0  # on the first commit: tokens that were in memory already
    preemptions: int = 0  # so far
    price: float = 0.0  # of a candidate: the probability from which it pays to verify one
    drafted: int = 0  # sessions of the pod that have a draft
    round_trip: float = 0.0  # to this session's draft and back; 0: unknown


@dataclass(eq=False)
class Attached:
    """A session, where its results go, and how it fares. `message` runs on the outbox's event loop."""

    session: Session
    outbox: Outbox[Any]
    message: Callable[[Verdict, StepTimes], Any]
    arrival: int = 0
    preemptions: int = 0
    waiting_since: float = 0.0  # for memory
    queued: float = 0.0  # seconds
    untold: Verdict | None = None  # of the last steps
    told: float = 0.0  # when a verdict was last told
    price: float = 0.0  # as was told with it
    let_in: float = 0.0  # when it got its memory
    decided: bool = False  # a step has ended since it was last looked at

    @property
    def precedence(self) -> tuple[bool, int]:
        """Who has been preempted goes before all who are new; then in order of arrival."""
        return (not self.preemptions, self.arrival)


@dataclass
class Load:
    """How full and how busy. Written by the loop's thread, read by any."""

    running: int = 0
    waiting: int = 0
    stalled: int = 0  # of those waiting, far ahead of their readers
    steps: int = 0
    rows: int = 0
    committed: int = 0  # tokens
    drafted: int = 0  # candidates verified
    accepted: int = 0
    outcomes: int = 0  # verdicts on sessions that have a draft and go on
    foreseen: int = 0  # of these, those whose next candidates had come before the step was over
    refused: int = 0  # messages of candidates that made no sense
    prompt_tokens: int = 0  # that sessions came with
    found_tokens: int = 0  # of these, in memory already
    preemptions: int = 0
    busy: float = 0.0  # seconds spent in steps
    step_begun: float = 0.0  # when the step under way was; 0: none is
    step_expected: float = 0.0  # seconds that a step of its size usually takes
    lifetime: float = 1.0  # seconds they had memory for, moving average

    def expected_wait(self, waiting: int) -> float:
        """Seconds until one more than `waiting` sessions have had their turn."""
        return min(60.0, max(0.1, self.lifetime * (waiting + 1) / max(1, self.running)))


class StepLoop(Worker):
    """`step_rows`: rows of prompts in one step at most; `run_ahead`: tokens a session may be ahead of what its
    client has read; `shared_tokens`: of finished texts, kept for their tenant to guess from; `cost`: measured unless it
    is known."""

    def __init__(
        self,
        engine: Engine,
        *,
        step_rows: int = 512,
        run_ahead: int = 256,
        shared_tokens: int = 0,
        cost: StepCost | None = None,
        guard: Guard | None = None,
    ) -> None:
        super().__init__("step-loop")
        self.load = Load()
        self._engine = engine
        self._forward = step_of(engine)
        blocks = max(2, (engine.capacity - MOST_CANDIDATES) // BLOCK)
        self.pool = BlockPool(blocks)
        self._scratch = list(range(blocks * BLOCK, engine.capacity))[:MOST_CANDIDATES]
        self._step_rows = step_rows
        self._run_ahead = run_ahead
        self._arrivals = itertools.count()
        self._waiting: list[Attached] = []  # for memory, in order of precedence
        self._running: list[Attached] = []  # in order of arrival
        self._cores = Cores(engine, lambda: cost or StepCost.measure(engine, blocks * BLOCK))
        warm_up(engine.vocabulary)
        self._guard = guard or Guard()
        self._shared = SharedTexts(shared_tokens)
        self._price = 0.0  # of a candidate, moving average
        self._drafted = 0  # sessions that have a draft
        self._last_step = 0.0  # when it ended
        self._idle = True  # whether there has been nothing to do since
        self._put_off: float | None = None  # since when a step is
        self._reading = False  # whether prompts have the cores that drafts would take

    @property
    def context(self) -> int:
        """Tokens that one session can have memory for at most."""
        return self.pool.usable * BLOCK

    def price_for(self, session: Session, sessions: int) -> float:
        """Of a candidate of the draft of a session that is the last of so many, as far as can be told before it has
        taken a step, and if the others are like it. Changes nothing: any thread may ask."""
        if self._cores.divided:
            return NOTHING_PAYS  # until its prompt is read: with fewer cores that would take longer
        crowd = Crowd(sessions, session.policy.speculate, session.guesses, not session.request.chooser.sampling.greedy)
        if self._guard.way_for(crowd, time.monotonic()) is not Way.DRAFTED:
            return NOTHING_PAYS
        return candidates([()] * sessions, self._cost, sessions, 0).price

    @property
    def _cost(self) -> StepCost:
        return self._cores.cost

    # --- actions: called in the loop's thread -------------------------------------------------------

    def attach(self, attached: Attached) -> None:
        """Let a session in as soon as there is memory for it."""
        attached.arrival = next(self._arrivals)
        attached.waiting_since = time.monotonic()
        insort(self._waiting, attached, key=lambda a: a.precedence)
        self.load.prompt_tokens += attached.session.tree.base
        self._count()

    def detach(self, session: Session) -> None:
        """Forget a session and free its memory, whatever state it is in."""
        self._take_memory(session)
        self._waiting = [a for a in self._waiting if a.session is not session]
        self._running = [a for a in self._running if a.session is not session]
        self._count()

    # --- the loop -----------------------------------------------------------------------------------

    def turn(self) -> float | None:
        self._admit()
        ready = [a for a in self._running if not self._stalled(a) and a.session.computable]
        if not ready:
            self._put_off, self._idle = None, True
            return None  # the next action wakes the loop
        self._count_foreseen(ready)
        self._settle_who_has_the_cores()
        crowd = self._crowd(ready)
        if crowd is not None:
            self._guard.face(crowd, time.monotonic())
        for attached in ready:
            if self._guesses(attached) and not attached.session.remaining_prompt:
                attached.session.guess(self._price, self._shared.of(attached.session.request.tenant))
        now = time.monotonic()
        self._cores.share(with_drafts=any(self._drafts(a) for a in ready), now=now)
        if not any(a.session.remaining_prompt for a in ready):
            prospects = [a.session.prospect(now, self._price) if self._drafts(a) else UNDRAFTED for a in ready]
            until = wait_until(prospects, now, self._last_step, self._cost.of(len(ready)))
            if until is not None:
                self._put_off = self._put_off or now
                return until - now
        self.load.step_begun, self.load.step_expected = now, 0.0
        self._step([attached for attached in ready if self._hold(attached)])
        self.load.step_begun = 0.0
        self._put_off = None
        return 0.0

    def _step(self, ready: list[Attached]) -> None:
        if not ready:
            return
        # 1. What every session adds to the batch.
        start = time.monotonic()
        waited = start - self._put_off if self._put_off else 0.0
        packer = self._engine.packer()
        planned = self._plan(packer, ready)
        rows = len(packer.tokens)
        self.load.step_expected = self._cost.of(rows)

        # 2. One forward pass, one walk.
        try:
            forward_start = time.monotonic()
            descents = [(a, Descent(a.session, p)) for a, p in planned if p.tip is not None]
            results = self._forward(
                packer.pack(), lambda: dict(ask for _, descent in descents for ask in descent.asks())
            )
            forward_time = time.monotonic() - forward_start
            walk([descent for _, descent in descents], results)
            self._look([descent for _, descent in descents if descent.error is None], results)
        except Exception as error:  # the step's sessions are lost, the loop is not
            for attached, _ in planned:
                self._quarantine(attached, error)
            return

        # 3. Commit: keep what was accepted, tell everybody.
        for attached, piece in planned:
            if piece.tip is None:
                attached.session.computed += piece.count
        kept = [(a, descent) for a, descent in descents if descent.error is None]
        self._move([move for _, descent in kept for move in descent.moves])
        self._add_logprobs([descent for _, descent in kept], results)
        begin = start if self._idle else self._last_step
        end = self._last_step = time.monotonic()
        self._idle = False
        verdicts = [(attached, attached.session.settle(descent, end)) for attached, descent in kept]
        for attached, _ in kept:  # a prompt that is not through yet may still turn out to be no numbers
            attached.session.publish()
        for attached, descent in descents:
            if descent.error is not None:
                self._quarantine(attached, descent.error)
        self._observe(rows, end - start, verdicts)
        # A step with prompts in it, or the ends of some, tells nothing of speculation.
        if all(piece.tip is not None and piece.count == 1 for _, piece in planned):
            self._watch(rows, end - begin, verdicts)
        self._deliver(verdicts, forward_time, end - start, waited)

    def _plan(self, packer: Packer, ready: list[Attached]) -> list[tuple[Attached, Planned]]:
        """Rows of all: the tips of those who decode, the candidates that pay, pieces of prompts."""
        decoding = [a for a in ready if not a.session.remaining_prompt]
        prompts = [a for a in ready if a.session.remaining_prompt]
        scratch = list(self._scratch)
        offers = [a.session.offers() if self._drafts(a) or self._guesses(a) else iter(()) for a in decoding]
        planned: list[tuple[Attached, Planned]] = []
        chosen, price = candidates(offers, self._cost, len(decoding), len(scratch))
        if decoding:
            self._price += PRICE_SMOOTHING * (min(price, NOTHING_PAYS) - self._price)
        foresights = self._look_ahead(decoding, chosen)
        for attached, nodes, foresight in zip(decoding, chosen, foresights, strict=True):
            self._reserve_for(attached.session, nodes)
            planned.append((attached, attached.session.plan(packer, 1, nodes, scratch, foresight)))
        remaining = [a.session.computable for a in prompts]
        shares = prompt_rows(remaining, len(decoding), self._cost, len(packer.tokens), self._step_rows)
        for attached, share in zip(prompts, shares, strict=True):
            planned.append((attached, attached.session.plan(packer, share, [], scratch)))
        return planned

    def _look_ahead(self, decoding: list[Attached], chosen: list[list[Node]]) -> list[Foresight | None]:
        """The lookahead windows of a step, which is to hold the `chosen` candidates; a Jacobi window's join them."""
        rows = len(decoding) + sum(map(len, chosen))
        free = len(self._scratch) - sum(map(len, chosen))
        foresights: list[Foresight | None] = []
        for attached, nodes in zip(decoding, chosen, strict=True):
            session, size = attached.session, None
            if self._guesses(attached):
                guesser, tokens = session.guesser, len(decoding)
                size = session.policy.lookahead or window_size(guesser.sizes, guesser.gain, tokens, self._cost, rows)
            if size is not None and size.most_rows > free:
                size = None
            foresight = session.look_ahead(size)
            foresights.append(foresight)
            if foresight is not None:
                planned = {id(node) for node in nodes}
                nodes += [node for node in foresight.candidates if id(node) not in planned]
                rows += len(foresight.nodes)
                free -= len(foresight.nodes)
        return foresights

    def _look(self, descents: list[Descent], results: Rows) -> None:
        """Tell the windows what the target chooses below them."""
        looking = [descent for descent in descents if descent.planned.foresight is not None]
        if not looking:
            return
        rows = [row for descent in looking for row in descent.planned.foreseen]
        asks = [ask for descent in looking for ask in descent.session.asks_ahead(descent.planned)]
        chosen = iter(results.choose(rows, asks)[0].tolist())
        for descent in looking:
            tokens = list(itertools.islice(chosen, len(descent.planned.foreseen)))
            descent.session.guesser.looked(tokens, len(descent.verdict.tokens))

    # --- memory -------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Give memory to who waits for it, in order, as far as it goes."""
        for attached in [a for a in self._waiting if not self._stalled(a)]:
            while not self._let_in(attached):
                stalled = [a for a in self._running if self._stalled(a)]
                if not stalled:
                    return
                self._preempt(stalled[-1])  # it has no use for its memory until its reader catches up

    def _let_in(self, attached: Attached) -> bool:
        session = attached.session
        try:
            source, target = session.settle_in(self.pool, min(len(self._running), self.pool.usable // MARGIN))
        except PoolFullError:
            return False
        self._waiting.remove(attached)
        insort(self._running, attached, key=lambda a: a.arrival)
        self._copy(source, target)
        now = attached.let_in = time.monotonic()
        session.pace.committed(session.tree.base, now)
        attached.queued += now - attached.waiting_since
        if not attached.preemptions:
            session.found = session.computed
            self.load.found_tokens += session.found
        self._count()
        return True

    def _drafts(self, attached: Attached) -> bool:
        """Whether it is worth its draft's while. Tokens that are contrasted need it anyway: the guard has no say."""
        worthwhile = self._guard.way is Way.DRAFTED and not self._reading
        return attached.session.policy.speculate and (worthwhile or self._unguarded(attached))

    def _guesses(self, attached: Attached) -> bool:
        """Whether it may have candidates of the verifier's own."""
        return attached.session.guesses and (self._insists(attached) or self._guard.way is not Way.PLAIN)

    def _unguarded(self, attached: Attached) -> bool:
        return attached.session.policy.always or attached.session.contrasts

    def _insists(self, attached: Attached) -> bool:
        """Whether it speculates in a way of its own, whatever the guard finds; which learns nothing of such steps."""
        return self._unguarded(attached) or attached.session.policy.lookahead is not None

    def _stalled(self, attached: Attached) -> bool:
        """Whether it is far ahead of its reader; `consumed` will wake the loop."""
        return attached.session.tree.base - attached.session.consumed > self._run_ahead

    def _hold(self, attached: Attached) -> bool:
        """Memory up to the tip, if need be at the expense of the youngest; False if this is the youngest, or
        has just been preempted for another."""
        while attached.session.table is not None:
            try:
                attached.session.table.reserve(attached.session.tree.base)
            except PoolFullError:
                self._preempt(self._running[-1])
            else:
                return True
        return False

    def _reserve_for(self, session: Session, nodes: list[Node]) -> None:
        """Room to accept candidates, if it is there for nothing."""
        missing = max((node.position + 1 for node in nodes), default=0) - len(session.slots)
        if 0 < missing <= self.pool.available * BLOCK:
            assert session.table is not None
            session.table.reserve(len(session.slots) + missing)

    def _preempt(self, attached: Attached) -> None:
        """Take a session's memory; its text is computed anew when there is room, before anyone new comes in."""
        if attached.untold is not None:
            Outbox.put_all([self._message(attached)])
        self._take_memory(attached.session)
        attached.preemptions += 1
        attached.waiting_since = time.monotonic()
        self._running.remove(attached)
        insort(self._waiting, attached, key=lambda a: a.precedence)
        self.load.preemptions += 1
        self._count()
        log.info("preempted", tokens=attached.session.tree.base, running=len(self._running))

    def _take_memory(self, session: Session, *, wipe: bool = False) -> None:
        spoiled = session.leave(wipe=wipe)
        self._copy(np.full(len(spoiled), NOWHERE), spoiled)

    def _move(self, moves: list[tuple[int, int]]) -> None:
        if moves:
            pairs = np.asarray(moves)
            self._copy(pairs[:, 0], pairs[:, 1])

    def _copy(self, source: Slots, target: Slots) -> None:
        if len(source):
            self._engine.copy(source, target)

    def _quarantine(self, attached: Attached, error: Exception) -> None:
        """End a session that failed, and wipe its memory: a NaN in it would spread to whoever gets it next."""
        log.error("session_failed", exc_info=error)
        if attached.untold is not None:
            Outbox.put_all([self._message(attached)])
        self._take_memory(attached.session, wipe=True)
        self.detach(attached.session)
        attached.outbox.put(error)

    # --- results ------------------------------------------------------------------------------------

    def _add_logprobs(self, descents: list[Descent], results: Rows) -> None:
        asking = [descent for descent in descents if descent.session.request.logprobs]
        if not asking:
            return
        rows = [row for descent in asking for row in descent.rows]
        tokens = np.asarray([token for descent in asking for token in descent.verdict.tokens])
        tops = [descent.session.request.logprobs - 1 for descent in asking for _ in descent.rows]
        found = iter(results.logprobs(rows, tokens, tops))
        for descent in asking:
            descent.verdict.logprobs = list(itertools.islice(found, len(descent.rows)))

    def _deliver(self, verdicts: list[tuple[Attached, Verdict]], forward: float, step: float, waited: float) -> None:
        now = time.monotonic()
        self._drafted = sum(attached.session.policy.speculate for attached in self._running)
        self._settle_who_has_the_cores()
        spacing = max(BLINK, len(self._running) / MESSAGES_A_SECOND)
        messages = []
        for attached, verdict in verdicts:
            attached.decided = True
            attached.untold = verdict if attached.untold is None else attached.untold.joined(verdict)
            waits = not attached.session.computable  # for its draft, which must hear of this
            wanted = self._drafts(attached) or attached.price < NOTHING_PAYS  # candidates; or so its draft thinks
            at_once = verdict.finish or waits or wanted or self._stalled(attached)
            pause = max(spacing, UNHURRIED) if attached.session.request.unhurried else spacing
            if at_once or now - attached.told >= pause:  # who is stalled waits for what its reader hears of
                messages.append(self._message(attached, forward, step, waited))
            if verdict.finish:
                self._shared.add(attached.session.request.tenant, attached.session.tree.committed)
                self.load.lifetime += 0.1 * (now - attached.let_in - self.load.lifetime)
                self.detach(attached.session)
        Outbox.put_all(messages)

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
            attached.session.pace.round_trip,
        )
        verdict, attached.untold = attached.untold, None
        attached.queued, attached.told = 0.0, time.monotonic()
        assert verdict is not None
        return attached.outbox, partial(attached.message, verdict, times)

    def _observe(self, rows: int, seconds: float, verdicts: list[tuple[Attached, Verdict]]) -> None:
        self._cores.observe(rows, seconds)
        load = self.load
        load.steps += 1
        load.rows += rows
        load.busy += seconds
        for _, verdict in verdicts:
            load.committed += len(verdict.tokens)
            load.drafted += verdict.offered
            load.accepted += verdict.accepted

    def _watch(self, rows: int, seconds: float, verdicts: list[tuple[Attached, Verdict]]) -> None:
        """Let the guard know what a step of sessions that could speculate has brought, in how many `seconds`."""
        crowd = self._crowd([attached for attached, _ in verdicts])
        if crowd is None:
            return
        before, sessions = self._guard.way, len(verdicts)
        self._guard.observe(
            crowd,
            taken=rows > sessions or self._cores.shared,
            tokens=sum(len(verdict.tokens) for _, verdict in verdicts),
            seconds=seconds,
            plain_rate=sessions / self._cores.undrafted_cost.of(sessions),
        )
        if self._guard.way is not before:
            log.debug("way_changed", way=self._guard.way.value, before=before.value, sessions=sessions)

    def _crowd(self, attached: list[Attached]) -> Crowd | None:
        """Those of a step, for the guard; None if it has no say."""
        crowd = Crowd(
            len(attached),
            drafted=any(a.session.policy.speculate for a in attached),
            guessing=any(a.session.guesses for a in attached),
            drawn=2 * sum(not a.session.request.chooser.sampling.greedy for a in attached) > len(attached),
        )
        insisting = any(self._insists(a) for a in attached)
        return crowd if (crowd.drafted or crowd.guessing) and not insisting else None

    def _settle_who_has_the_cores(self) -> None:
        """Prompts, while more of them are read than texts go on: drafts would have them take twice as long."""
        if self._cores.divided:
            reading = sum(bool(attached.session.remaining_prompt) for attached in self._running)
            self._reading = 2 * reading > len(self._running)

    def _count_foreseen(self, ready: list[Attached]) -> None:
        """What came while the last step was under way is in place; nothing has been waited for yet."""
        for attached in ready:
            if attached.decided and attached.session.policy.speculate:
                self.load.outcomes += 1
                self.load.foreseen += attached.session.drafted
            attached.decided = False

    def _count(self) -> None:
        self.load.running, self.load.waiting = len(self._running), len(self._waiting)
        self.load.stalled = sum(self._stalled(attached) for attached in self._waiting)
