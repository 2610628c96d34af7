"""The three services in this process: real servers on real sockets, with tiny models."""

from __future__ import annotations

import asyncio
import copy
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import torch
from grpc_health.v1 import health_pb2_grpc
from numpy.typing import NDArray

from draft_service.__main__ import heads_servicer, translated
from draft_service.draft_loop import DraftLoop
from draft_service.drafter import Drafter
from draft_service.language_model import LanguageModelDrafter
from draft_service.learning_servicer import Learning
from draft_service.servicer import DraftLimits, DraftServicer
from draft_service.traffic import Traffic
from orchestrator.models.catalog import Catalog
from orchestrator.models.grammar_check import GrammarCheck
from orchestrator.pods.peers import Peers
from orchestrator.pods.pods import Pods
from orchestrator.requests.model import ServedModel
from orchestrator.servicer import GenerationServicer
from specdec.engine.batch import PackedBatch, Packer
from specdec.engine.engine import Engine, chains_only
from specdec.engine.engines.cpu_engine import CpuEngine
from specdec.engine.kv.slots import Slots
from specdec.engine.model_directory import ModelDirectory
from specdec.engine.placement import Placement
from specdec.grammar.compiler import GrammarCompiler
from specdec.serving.grammar_trials import GrammarTrials
from specdec.serving.identity import identity_of, pod_info
from specdec.serving.interceptor import CallInterceptor
from specdec.serving.mux.servicer import MuxServicer
from specdec.serving.process.health import HealthServicer
from specdec.serving.process.server import CHANNEL_OPTIONS, Servicer, registered
from specdec.serving.tls import server_credentials
from specdec.v2 import generation_pb2, generation_pb2_grpc, model_pb2
from specdec.wire.tls_files import TlsFiles
from tests.paged import Paged
from verifier_service.costs.step_latency import StepLatency
from verifier_service.heads_files import feature_source, read_heads
from verifier_service.proposers.draft_model import DraftModelProposer
from verifier_service.servicer import VerifierLimits, VerifierServicer
from verifier_service.settings.tuning import DEFAULTS, Tuning
from verifier_service.speculation.controller import SpeculationController
from verifier_service.step_loop import StepLoop

CAPACITY = 8192
REMOTE = model_pb2.DRAFTER_REMOTE
OWN_DRAFTERS = [model_pb2.DRAFTER_NGRAM, model_pb2.DRAFTER_LOOKAHEAD, model_pb2.DRAFTER_LOCAL_MODEL]
ALWAYS = generation_pb2.Speculation(drafters=[REMOTE], forced=True)


@dataclass
class SlowEngine:
    """An engine with delayed passes: a draft on a weak device, or a realistically large target."""

    inner: Engine
    delay: Callable[[], None]

    def __post_init__(self) -> None:
        self.capacity = self.inner.capacity
        self.vocabulary = self.inner.vocabulary
        self.numerics = self.inner.numerics
        self.exact = self.inner.exact
        self.chains_only = chains_only(self.inner)

    def packer(self) -> Packer:
        return self.inner.packer()

    def forward(self, batch: PackedBatch) -> NDArray[np.float32]:
        self.delay()
        return self.inner.forward(batch)

    def copy(self, source: Slots, target: Slots) -> None:
        self.inner.copy(source, target)


class SlowFeatures(SlowEngine):
    """The same for an engine with features of its layers."""

    inner: CpuEngine

    def __post_init__(self) -> None:
        super().__post_init__()
        self.device, self.dtype, self.threads = self.inner.device, self.inner.dtype, self.inner.threads

    def layer_count(self) -> int:
        return self.inner.layer_count()

    def forward_features(
        self, batch: PackedBatch, layers: Sequence[int]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        self.delay()
        return self.inner.forward_features(batch, layers)

    def token_embeddings(self) -> Any:
        return self.inner.token_embeddings()


def long_steps() -> None:
    """Delay a step: a text of some ten tokens then outlasts a test's delays on a busy machine, and drafts are in
    time."""
    time.sleep(0.03)


@dataclass
class Pod:
    """A service on a port that it keeps across restarts."""

    service: Servicer
    address: str = "127.0.0.1:0"
    tls: TlsFiles | None = field(default=None, kw_only=True)  # None: no encryption
    server: grpc.aio.Server = field(init=False)
    mux: MuxServicer = field(init=False)

    async def start(self) -> None:
        gates = getattr(self.service, "gates", ())
        self.server = grpc.aio.server(interceptors=[CallInterceptor(gates=gates)], options=CHANNEL_OPTIONS)
        self.mux = registered(self.service, self.server)
        checks = HealthServicer()
        checks.report({self.service.name: True})
        health_pb2_grpc.add_HealthServicer_to_server(checks, self.server)
        if self.tls is None:
            port = self.server.add_insecure_port(self.address)
        else:
            port = self.server.add_secure_port(self.address, server_credentials(self.tls))
        self.address = f"127.0.0.1:{port}"
        await self.server.start()

    async def stop(self, grace: float | None = None) -> None:
        self.mux.drain()
        await self.server.stop(grace)


@dataclass
class VerifierPod(Pod):
    service: VerifierServicer
    loop: StepLoop = field(kw_only=True)


@dataclass
class DraftPod(Pod):
    service: DraftServicer
    loop: DraftLoop = field(kw_only=True)
    drafter: Drafter = field(kw_only=True)


@asynccontextmanager
async def running(pod: Pod) -> AsyncIterator[Pod]:
    await pod.start()
    try:
        yield pod
    finally:
        await pod.stop()
        await pod.service.close()


@asynccontextmanager
async def served(service: Servicer, tls: TlsFiles | None = None) -> AsyncIterator[tuple[str, grpc.aio.Server]]:
    """Serve one service on a free port; yield its address."""
    async with running(Pod(service, tls=tls)) as pod:
        yield pod.address, pod.server


@dataclass
class Stack:
    """Running services, with clients and internals for tests."""

    address: str
    stub: Any
    orchestrator: GenerationServicer
    verifiers: list[VerifierPod]
    drafts: list[DraftPod]
    model: ServedModel
    peers: Peers
    catalog: Catalog

    @property
    def verifier_loop(self) -> StepLoop:
        return self.verifiers[0].loop

    @property
    def draft_loop(self) -> DraftLoop | None:
        return self.drafts[0].loop if self.drafts else None

    @property
    def draft_slots_used(self) -> int:
        """Return the KV slots in use by sessions at all drafts."""
        return sum(pod.drafter.slots_used for pod in self.drafts)

    @property
    def verifier_server(self) -> grpc.aio.Server:
        return self.verifiers[0].server

    @property
    def draft_server(self) -> grpc.aio.Server | None:
        return self.drafts[0].server if self.drafts else None

    @property
    def idle(self) -> bool:
        """Return whether no session has memory at any pod."""
        return not any(pod.loop.pool.held for pod in self.verifiers) and not any(
            pod.drafter.slots_used for pod in self.drafts
        )

    async def generate(self, prompt: list[int], **fields: Any) -> generation_pb2.Completion:
        """Return one completion of a token prompt; keywords are fields of GenerateRequest, `sampling` a dict."""
        (completion,) = (await self.complete(prompt, **fields)).completions
        return completion

    async def complete(self, prompt: list[int], **fields: Any) -> generation_pb2.CompleteResponse:
        request = generation_pb2.CompleteRequest(request=request_of(prompt, **fields))
        response: generation_pb2.CompleteResponse = await self.stub.Complete(request)
        return response


def request_of(prompt: list[int], **fields: Any) -> generation_pb2.GenerateRequest:
    sampling = generation_pb2.SamplingParameters(**fields.pop("sampling", {}))
    if fields.pop("plain", False):
        fields["speculation"] = generation_pb2.Speculation(off=True)
    return generation_pb2.GenerateRequest(tokens=generation_pb2.TokenPrompt(ids=prompt), sampling=sampling, **fields)


def as_it_is(number: int, identity: model_pb2.ModelIdentity) -> None:
    """Leave a verifier's identity unchanged."""


_idle_engines: defaultdict[tuple[Any, ...], list[CpuEngine]] = defaultdict(list)
"""Idle engines by their arguments. A new loop treats all memory as unused."""
_costs: dict[tuple[Any, ...], StepLatency] = {}
"""Step latency as first measured, by the engine's arguments and delay."""


@contextmanager
def torch_engine(directory: Path, **options: Any) -> Iterator[CpuEngine]:
    """Yield an engine for exclusive use; a new one (with its reference check) only if none is idle."""
    idle = _idle_engines[directory, torch.get_num_threads(), *sorted(options.items())]
    engine = idle.pop() if idle else CpuEngine(ModelDirectory(directory), **options)
    try:
        yield engine
    finally:
        idle.append(engine)


def cost_of(engine: Engine, tuning: Tuning, *made_with: Any) -> StepLatency:
    """Return the step latency, measured once for all equal engines."""
    key = tuning, *made_with
    if key not in _costs:
        _costs[key] = StepLatency.measure(engine, engine.capacity, tuning.latency)
    return copy.deepcopy(_costs[key])


@asynccontextmanager
async def stack(
    target: Path,
    draft: Path | None,
    *,
    verifiers: int = 1,
    drafts: int = 1,
    delay: Callable[[], None] | None = None,
    target_delay: Callable[[], None] | None = None,
    draft_engine: Callable[[ModelDirectory], Engine] | None = None,
    patience_seconds: float = 0.02,
    silence_seconds: float = 1.5,
    stuck_seconds: float = 2.0,
    failover_seconds: float = 30.0,
    draft_limits: DraftLimits | None = None,
    verifier_limits: VerifierLimits | None = None,
    capacity: int = CAPACITY,
    dtype: str = "float32",
    exact: bool = True,
    verifier_kind: type[VerifierServicer] = VerifierServicer,
    draft_kind: type[DraftServicer] = DraftServicer,
    translates: bool = False,
    traffic: Traffic | None = None,
    learning_key: str | None = None,
    disguise: Callable[[int, model_pb2.ModelIdentity], None] = as_it_is,
    controller: SpeculationController | None = None,
    draft_model: Path | None = None,
    heads: Path | None = None,
    draft_heads: Path | None = None,
    feature_heads: Sequence[Path] = (),
    paged: bool = False,
    block_verification: bool = True,
    tuning: Tuning = DEFAULTS,
) -> AsyncIterator[Stack]:
    """Run verifiers, an orchestrator and, unless `draft` is None, drafts; `delay` slows a draft's engine,
    `target_delay` the target's. Verifiers may have a `draft_model` or `heads`; `paged` ones take chains of candidates
    only; without `block_verification` they test draws one by one. Drafts with `draft_heads` run these, fed by the
    verifiers; each verifier sends features for its `feature_heads`, if given, instead of these. `verifier_kind` and
    `draft_kind` replace servicers; a draft that `translates` has another tokenizer; `traffic` keeps texts that permit
    it, for holders of the `learning_key`; `disguise` modifies the reported identity of each verifier, given its
    number."""
    async with AsyncExitStack() as exits:

        async def verifier_pod(number: int) -> VerifierPod:
            engine: Engine = exits.enter_context(torch_engine(target, capacity=capacity, dtype=dtype, exact=exact))
            if paged:
                engine = Paged(engine)
            if target_delay is not None:
                slow = SlowEngine if draft_heads is None else SlowFeatures
                engine = slow(engine, target_delay)
            own = None
            if draft_model is not None:
                small = exits.enter_context(torch_engine(draft_model, capacity=capacity, exact=False))
                own = DraftModelProposer(small, ModelDirectory(draft_model).context)
            cost = cost_of(engine, tuning, target, capacity, dtype, exact, target_delay, paged)
            own_heads = None if heads is None else read_heads(heads, None, ModelDirectory(target)).load(engine)
            features = None
            if draft_heads is not None:
                fed = feature_heads[number] if feature_heads else draft_heads
                features = feature_source(fed, 256, ModelDirectory(target), engine)
            loop = StepLoop(
                engine,
                latency=cost,
                controller=controller,
                draft_model=own,
                heads=own_heads,
                features=features,
                block_verification=block_verification,
                tuning=tuning,
            )
            loop.start()
            identity = identity_of(ModelDirectory(target), engine, loop.context)
            disguise(number, identity)
            limits = verifier_limits or VerifierLimits()
            grammars = GrammarCompiler.of(ModelDirectory(target))
            service = verifier_kind(loop, identity, limits, pod_info(engine), grammars, GrammarTrials(target))
            pod = VerifierPod(service, loop=loop)
            await exits.enter_async_context(running(pod))
            return pod

        async def draft_pod(directory: ModelDirectory) -> DraftPod:
            if draft_heads is not None:
                placement = Placement("torch", "float32", kv_tokens=capacity)
                service = heads_servicer(draft_heads, directory, placement, 1, draft_limits or DraftLimits())
                loop = service._loop
                pod = DraftPod(service, loop=loop, drafter=loop.drafter)
                await exits.enter_async_context(running(pod))
                return pod
            engine: Engine
            if draft_engine is not None:
                engine = await asyncio.to_thread(draft_engine, directory)
            else:
                engine = exits.enter_context(torch_engine(directory.path, capacity=capacity, exact=False))
            if delay is not None:
                engine = SlowEngine(engine, delay)
            of_target, translation = translated(directory, target) if translates else (directory, None)
            drafter = LanguageModelDrafter(engine, translation=translation, context=directory.context)
            loop = DraftLoop(drafter, traffic)
            loop.start()
            identity, limits = identity_of(directory, engine, capacity), draft_limits or DraftLimits()
            identity.tokenizer_fingerprint = of_target.tokenizer_fingerprint
            identity.vocabulary_size = of_target.vocabulary
            grammars, trials = GrammarCompiler.of(of_target), GrammarTrials(of_target.path)
            learning = Learning(learning_key, traffic.forgotten) if traffic and learning_key else None
            more = (translation, learning)
            service = draft_kind(loop, identity, limits, pod_info(engine), grammars, trials, *more)
            pod = DraftPod(service, loop=loop, drafter=drafter)
            await exits.enter_async_context(running(pod))
            return pod

        verifying = [await verifier_pod(number) for number in range(verifiers)]
        drafting = [] if draft is None else [await draft_pod(ModelDirectory(draft)) for _ in range(drafts)]
        peers = Peers(
            Pods(pod.address for pod in verifying),
            Pods(pod.address for pod in drafting) if drafting else None,
            patience_seconds=patience_seconds,
            silence_seconds=silence_seconds,
            stuck_seconds=stuck_seconds,
            failover_seconds=failover_seconds,
            drafts_are_trusted=True,
        )
        model = ServedModel.of(ModelDirectory(target))
        catalog = Catalog.of(model, peers, GrammarCheck(target))
        orchestrator = GenerationServicer(catalog)
        address, _ = await exits.enter_async_context(served(orchestrator))
        channel = await exits.enter_async_context(grpc.aio.insecure_channel(address))
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        yield Stack(address, stub, orchestrator, verifying, drafting, model, peers, catalog)


def peers_at(services: Stack, draft: str) -> Peers:
    """Return the stack's verifiers with a draft at another address."""
    return Peers(Pods(pod.address for pod in services.verifiers), Pods([draft]), drafts_are_trusted=True)


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for a condition; raise TimeoutError after `seconds`."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)
