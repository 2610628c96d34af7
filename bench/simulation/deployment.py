"""A deployment on virtual time, and the sessions that keep it busy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import cast

import grpc
import structlog

from bench.simulation.devices import SharedDevice, SimulatedEngine
from bench.simulation.scenario import Outcome, Scenario
from bench.systems import synchronous
from draft_service.language_model import LanguageModelDrafter
from draft_service.pass_times import ROWS, WIDTHS, PassTimes, widest_of_all, widest_of_session
from draft_service.servicer import DraftLimits, DraftServicer
from evaluation import virtual_time
from evaluation.channel import Channel
from evaluation.workers import VirtualDraftLoop, VirtualStepLoop, sleep
from orchestrator.generation.generation import Generation
from orchestrator.models.revision import Revision
from orchestrator.pods.peers import Peers
from orchestrator.pods.pods import Pods
from orchestrator.requests.model import ServedModel
from orchestrator.requests.sample import PromptTokens, Sample
from orchestrator.text.request_timeline import SampleTimeline
from specdec.decoding.sampling import Rule, Sampling
from specdec.decoding.speculation import NO_DRAFTERS, CandidateSource, SpeculationOptions
from specdec.engine.working_memory import MAX_STEP_CANDIDATES
from specdec.serving.identity import PROTOCOL_VERSION
from specdec.serving.messages import sampling_message
from specdec.serving.timeline import Timeline
from specdec.text.tokenizer import Tokenizer
from specdec.v2 import model_pb2
from verifier_service.servicer import VerifierLimits, VerifierServicer

FINGERPRINT = "simulated"
PROMPT = 32
"""Tokens of a prompt."""

MAX_TOKENS_A_STEP = 32
"""A session's text has room for this many tokens per measured step: no session may end while it is measured."""


class LockstepLoop(VirtualStepLoop):
    """A step loop that steps only when all its sessions can, like an engine that drafts for a batch, then verifies
    it."""

    def turn(self) -> float | None:
        self._queue.admit()  # a full queue would refuse later sessions
        if all(entry.session.computable for entry in self._queue.running):
            return super().turn()
        return None  # a draft's answer wakes the loop


class Spelling:
    """The part of a tokenizer needed by a generation: every token is a letter."""

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        return "".join(chr(0x100 + token) for token in tokens)

    def piece(self, token: int) -> bytes:
        return self.decode([token]).encode()

    def characters(self) -> Letters:
        return Letters()

    def is_spelt(self, token: int, *, special: bool = False) -> bool:
        return True

    def added_token(self, text: str) -> None:
        return None

    def names_special_token(self, text: str) -> bool:
        return False


class Letters:
    """The characters of a text, one token each."""

    def whole_after(self, token: int) -> bool:
        return True

    def is_byte(self, token: int) -> bool:
        return False

    def left_open(self, run: list[int]) -> tuple[list[int], int]:
        return [], 0


@dataclass(frozen=True)
class Totals:
    """Counters of a deployment at one moment."""

    time: float  # end of the last step
    tokens: int
    steps: int
    rows: int
    drafted: int
    busy: float
    draft_steps: int
    traffic: tuple[int, int, int, int]


class Deployment:
    """A deployment: one verifier, draft pods, an orchestrator's generations. It runs on virtual time only."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._context = PROMPT + MAX_TOKENS_A_STEP * (scenario.warm_up + scenario.measured + 10)
        self._model = ServedModel(
            name="simulated",
            tokenizer=cast("Tokenizer", Spelling()),
            tokenizer_fingerprint=FINGERPRINT,
            context=self._context,
            vocabulary=scenario.language.vocabulary,
            end_tokens=frozenset(),
        )
        self._identity = model_pb2.ModelIdentity(
            protocol_version=PROTOCOL_VERSION,
            model="simulated",
            tokenizer_fingerprint=FINGERPRINT,
            context_tokens=self._context,
            vocabulary_size=scenario.language.vocabulary,
        )
        self._occupy = SharedDevice().occupy if scenario.shared else sleep
        self._verifier_loop = self._target()
        self._verifier = Channel(self._verifier_servicer(), scenario.delay)
        self._draft_loops = [self._draft() for _ in range(scenario.drafts)]
        self._drafts = [Channel(self._draft_servicer(loop), scenario.delay) for loop in self._draft_loops]
        for loop in (self._verifier_loop, *self._draft_loops):
            loop.start()
        channels = {"verifier": self._verifier, **{f"draft {i}": draft for i, draft in enumerate(self._drafts)}}

        def pods(addresses: Iterable[str]) -> Pods:
            connect = cast("Callable[[str], grpc.aio.Channel]", channels.__getitem__)
            return Pods(addresses, connect=connect, clock=asyncio.get_running_loop().time)

        drafts = [address for address in channels if address != "verifier"]
        self._peers = Peers(pods(["verifier"]), pods(drafts) if drafts else None, drafts_are_trusted=True)
        self._revision = Revision(self._model, self._peers)

    async def end(self) -> None:
        for loop in (self._verifier_loop, *self._draft_loops):
            await loop.end()

    async def generate(self, number: int, max_tokens: int | None = None) -> list[int]:
        """Run one session; return its tokens."""
        sample = Sample(
            index=0,
            prompt=PromptTokens(prompt(number)),
            generated=[],
            sampling=Sampling(),
            sampling_message=sampling_message(Sampling()),
            max_tokens=max_tokens or self._context,
            min_tokens=0,
            end_tokens=frozenset(),
            stop=(),
            top_logprobs=None,
            speculation=SpeculationOptions(
                # The simulated language has independent tokens, so there are no repetitions to look up.
                drafters=frozenset({CandidateSource.REMOTE}) if self._drafts else NO_DRAFTERS,
                forced=self._scenario.always or self._scenario.synchronous,
                max_candidates=0,
                max_depth=self._scenario.nodes if self._scenario.synchronous else 0,
                max_branches=self._scenario.branches,
            ),
            tenant="",
            rule=Rule.COUPLED,
            contrast=model_pb2.Contrast(),
            typicality=model_pb2.Typicality(),
        )
        timeline = SampleTimeline(Timeline(), self._revision.stats.failover_events)
        generation = Generation(sample, self._revision, self._peers, None, timeline)
        tokens: list[int] = []
        async for response in generation.run():
            tokens += response.tokens
        return tokens

    def totals(self) -> Totals:
        load = self._verifier_loop.stats
        return Totals(
            time=self._verifier_loop.last_step,
            tokens=load.committed,
            steps=load.steps,
            rows=load.rows,
            drafted=load.offered,
            busy=load.busy,
            draft_steps=sum(loop.steps for loop in self._draft_loops),
            traffic=(
                sum(channel.back.bytes for channel in self._drafts),
                self._verifier.back.bytes,
                sum(channel.there.bytes for channel in self._drafts),
                self._verifier.there.bytes,
            ),
        )

    def _target(self) -> VirtualStepLoop:
        language, target = self._scenario.language, self._scenario.hardware.target
        engine = SimulatedEngine(
            target,
            language.target_logits,
            capacity=2 * self._scenario.sessions * (self._context + 64) + MAX_STEP_CANDIDATES + 64,
            vocabulary=language.vocabulary,
            occupy=self._occupy,
        )
        kind = LockstepLoop if self._scenario.lockstep else VirtualStepLoop
        return kind(engine, latency=target.latency())

    def _draft(self) -> VirtualDraftLoop:
        language, nodes = self._scenario.language, self._scenario.nodes
        engine = SimulatedEngine(
            self._scenario.hardware.draft,
            language.draft_logits,
            capacity=(self._scenario.sessions + 1) * (2 * self._context + nodes),
            vocabulary=language.vocabulary,
            occupy=self._occupy,
        )
        seconds = self._scenario.hardware.draft.seconds
        rows = widest_of_all(seconds, seconds(WIDTHS[0]), ROWS[-1])
        times = PassTimes({width: seconds(width) for width in WIDTHS})
        return VirtualDraftLoop(
            LanguageModelDrafter(engine, rows=rows, rows_per_session=widest_of_session(seconds), times=times)
        )

    def _verifier_servicer(self) -> VerifierServicer:
        kind = synchronous.VerifierServicer if self._scenario.synchronous else VerifierServicer
        limits = VerifierLimits(max_nodes=self._scenario.nodes)
        return kind(self._verifier_loop, self._identity, limits)

    def _draft_servicer(self, loop: VirtualDraftLoop) -> DraftServicer:
        kind = synchronous.DraftServicer if self._scenario.synchronous else DraftServicer
        return kind(loop, self._identity, DraftLimits(max_nodes=self._scenario.nodes))


def prompt(number: int) -> list[int]:
    """Return the prompt of a session; prompts differ within their first four tokens."""
    return [(number >> (6 * place)) % 64 if place < 4 else place for place in range(PROMPT)]


@asynccontextmanager
async def deployed(scenario: Scenario) -> AsyncIterator[Deployment]:
    deployment = Deployment(scenario)
    try:
        yield deployment
    finally:
        await deployment.end()


async def _measure(scenario: Scenario) -> Outcome:
    async with deployed(scenario) as deployment:
        sessions = [asyncio.create_task(deployment.generate(number)) for number in range(scenario.sessions)]
        await asyncio.sleep(scenario.warm_up * scenario.step)
        before = deployment.totals()
        await asyncio.sleep(scenario.measured * scenario.step)
        after = deployment.totals()
        for session in sessions:
            session.cancel()
        for ended in await asyncio.gather(*sessions, return_exceptions=True):
            if not isinstance(ended, asyncio.CancelledError):
                raise RuntimeError("a session ended early") from (ended if isinstance(ended, Exception) else None)
    return _difference(before, after)


def _difference(before: Totals, after: Totals) -> Outcome:
    if before.steps in (0, after.steps):
        raise ValueError("no step ended during the warm-up or the measured time: increase both")
    seconds = after.time - before.time
    candidates = after.drafted - before.drafted
    traffic = [late - early for early, late in zip(before.traffic, after.traffic, strict=True)]
    return Outcome(
        seconds=seconds,
        tokens=after.tokens - before.tokens,
        steps=after.steps - before.steps,
        session_steps=after.rows - before.rows - candidates,
        candidates=candidates,
        busy=(after.busy - before.busy) / seconds,
        draft_steps=after.draft_steps - before.draft_steps,
        to_orchestrator=(traffic[0], traffic[1]),
        from_orchestrator=(traffic[2], traffic[3]),
    )


def simulate(scenario: Scenario) -> Outcome:
    """Run a scenario on its own virtual clock; the services' logs are dropped."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    return virtual_time.run(_measure(scenario))
