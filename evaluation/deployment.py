"""A deployment on virtual time: one verifier, at most one draft service, and an orchestrator's generations."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import cast

import grpc

from draft_service.language_model import LanguageModelDrafter
from draft_service.servicer import DraftLimits, DraftServicer
from evaluation.channel import Channel
from evaluation.pair import Pair
from evaluation.timed_engine import TimedEngine
from evaluation.virtual_time import VirtualLoop
from evaluation.workers import Inbox, SpendingInbox, VirtualDraftLoop, VirtualStepLoop, sleep, unspent_seconds
from orchestrator.generation.generation import Generation
from orchestrator.models.revision import Revision
from orchestrator.pods.peers import Peers
from orchestrator.pods.pods import Pods
from orchestrator.requests.sample import Sample
from orchestrator.text.request_timeline import SampleTimeline
from specdec.grammar.compiler import GrammarCompiler
from specdec.serving.identity import identity_of
from specdec.serving.timeline import Timeline
from specdec.v2 import generation_pb2
from verifier_service.costs.step_latency import MEASURED_ROWS, StepLatency
from verifier_service.proposers.draft_model import DraftModelProposer
from verifier_service.servicer import VerifierLimits, VerifierServicer

PAUSE = 0.5
"""Virtual seconds that a patient step loop waits after each step: enough for a draft's few messages."""


class PatientStepLoop(VirtualStepLoop):
    """A step loop that waits after each step for all candidates of its drafts, whose passes take no time."""

    def turn(self) -> float | None:
        wait = super().turn()
        sleep(PAUSE)
        return wait


@dataclass(frozen=True)
class Layout:
    """The place of the draft, and the speeds of the devices relative to this machine's."""

    remote: bool = False  # there is a draft service
    local: bool = False  # the verifier runs the draft itself
    delay: float = 0.0  # seconds from one service to another: a hop, and the network
    target_speed: float = 1.0
    draft_speed: float = 1.0
    step_seconds: float | None = None
    """Constant time of the target's passes, for any number of rows. The draft and all other code then take no time, so
    that every step has all candidates. None: real times."""


@dataclass(frozen=True)
class GeneratedText:
    """A text as its client got it."""

    tokens: list[int]
    finish: generation_pb2.Finish


class Deployment:
    """The services of a layout. Needs a running `VirtualLoop`."""

    def __init__(self, pair: Pair, layout: Layout) -> None:
        self._pair = pair
        self.target = TimedEngine(pair.target.engine, layout.target_speed, layout.step_seconds)
        small = pair.local_draft if layout.local else pair.draft
        self.draft = TimedEngine(small.engine, layout.draft_speed, None if layout.step_seconds is None else 0.0)
        self._inbox = SpendingInbox if layout.step_seconds is None else Inbox
        if layout.step_seconds is None:
            cast("VirtualLoop", asyncio.get_running_loop()).ahead = unspent_seconds
        self._loops: list[VirtualStepLoop | VirtualDraftLoop] = []
        channels = {"verifier": Channel(self._verifier(layout), layout.delay)}
        if layout.remote:
            channels["draft"] = Channel(self._draft(), layout.delay)
        for loop in self._loops:
            loop.start()
        connect = cast("Callable[[str], grpc.aio.Channel]", channels.__getitem__)

        def pods(*addresses: str) -> Pods:
            return Pods(addresses, connect=connect, clock=asyncio.get_running_loop().time)

        peers = Peers(pods("verifier"), pods("draft") if layout.remote else None, drafts_are_trusted=True)
        self._revision = Revision(pair.model, peers)

    async def complete(self, sample: Sample) -> GeneratedText:
        """Run a sample; return its text."""
        tokens: list[int] = []
        finish = generation_pb2.Finish()
        timeline = SampleTimeline(Timeline(), self._revision.stats.failover_events)
        async for response in Generation(sample, self._revision, self._revision.peers, None, timeline).run():
            tokens += response.tokens
            finish = response.finish
        return GeneratedText(tokens, finish)

    async def complete_all(
        self, samples: Sequence[Sample], streams: int, heard: Callable[[int], None] = lambda tokens: None
    ) -> list[GeneratedText]:
        """Run samples, `streams` at a time; return their texts in order. `heard` is called when a text is complete,
        with its planned tokens."""
        room = asyncio.Semaphore(streams)

        async def one(sample: Sample) -> GeneratedText:
            async with room:
                text = await self.complete(sample)
            heard(sample.max_tokens)
            return text

        return await asyncio.gather(*map(one, samples))

    async def end(self) -> None:
        for loop in self._loops:
            await loop.end()

    def _verifier(self, layout: Layout) -> VerifierServicer:
        target, local = self._pair.target, None
        if layout.local:
            draft = self._pair.local_draft
            local = DraftModelProposer(self.draft, draft.directory.context, _at(layout.draft_speed, draft.latency))
        latency = _at(layout.target_speed, target.latency)
        if layout.step_seconds is not None:
            latency = StepLatency(MEASURED_ROWS, [layout.step_seconds] * len(MEASURED_ROWS))
        kind = VirtualStepLoop if layout.step_seconds is None else PatientStepLoop
        loop = kind(self.target, latency=latency, draft_model=local, inbox=self._inbox)
        self._loops.append(loop)
        identity = identity_of(target.directory, target.engine, loop.context)
        return VerifierServicer(loop, identity, VerifierLimits(), grammars=GrammarCompiler.of(target.directory))

    def _draft(self) -> DraftServicer:
        draft, limits = self._pair.draft, DraftLimits()
        loop = VirtualDraftLoop(LanguageModelDrafter.of(self.draft, self._pair.width), inbox=self._inbox)
        self._loops.append(loop)
        identity = identity_of(draft.directory, draft.engine, draft.engine.capacity - 1 - limits.max_nodes)
        return DraftServicer(loop, identity, limits, grammars=GrammarCompiler.of(draft.directory))


def _at(speed: float, latency: StepLatency) -> StepLatency:
    """Return the latency on a device `speed` times as fast; measured steps will correct this estimate."""
    found = deepcopy(latency)
    found.become(1, latency.of(1) / speed)
    return found
