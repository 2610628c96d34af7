"""The three services in this process: real servers on real sockets, tiny models behind them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray

from draft_service.growth_loop import GrowthLoop
from draft_service.servicer import DraftServicer
from draft_service.servicer import Limits as DraftLimits
from orchestrator.generation import Peers
from orchestrator.request import Model
from orchestrator.servicer import GenerationServicer
from orchestrator.tokenizer import Tokenizer
from specdec.engine.batch import PackedBatch, Packer
from specdec.engine.engine import Engine
from specdec.engine.kv import Slots
from specdec.engine.model_directory import ModelDirectory
from specdec.engine.torch_engine import TorchEngine
from specdec.serving.interceptor import CallInterceptor
from specdec.serving.server import Service
from specdec.serving.wire import identity_of
from specdec.v1 import generation_pb2, generation_pb2_grpc
from verifier_service.servicer import Limits as VerifierLimits
from verifier_service.servicer import VerifierServicer
from verifier_service.step_loop import StepLoop

CAPACITY = 8192
ALWAYS = generation_pb2.SpeculationPolicy(mode=generation_pb2.SPECULATION_MODE_ALWAYS)


@dataclass
class SlowEngine:
    """An engine that takes its time: a draft on a weak device, or a target as large as real ones are."""

    inner: Engine
    delay: Callable[[], None]

    def __post_init__(self) -> None:
        self.capacity = self.inner.capacity
        self.vocabulary = self.inner.vocabulary
        self.numerics = self.inner.numerics
        self.exact = self.inner.exact

    def packer(self) -> Packer:
        return self.inner.packer()

    def forward(self, batch: PackedBatch) -> NDArray[np.float32]:
        self.delay()
        return self.inner.forward(batch)

    def copy(self, source: Slots, target: Slots) -> None:
        self.inner.copy(source, target)


def model_of(directory: ModelDirectory) -> Model:
    return Model(
        name=directory.name,
        tokenizer=Tokenizer(directory),
        tokenizer_fingerprint=directory.tokenizer_fingerprint,
        context=directory.context,
        vocabulary=directory.vocabulary,
        end_tokens=directory.end_tokens,
    )


@asynccontextmanager
async def served(service: Service) -> AsyncIterator[tuple[str, grpc.aio.Server]]:
    """A server with one service on a free port; its address."""
    server = grpc.aio.server(interceptors=[CallInterceptor()])
    service.register(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}", server
    finally:
        await server.stop(None)
        await service.close()


@dataclass
class Stack:
    """Running services and the ways into them."""

    address: str
    stub: Any
    verifier_loop: StepLoop
    draft_loop: GrowthLoop | None
    draft_server: grpc.aio.Server | None
    verifier_server: grpc.aio.Server
    model: Model
    peers: Peers

    async def generate(self, prompt: list[int], **fields: Any) -> generation_pb2.Completion:
        """One completion of a token prompt; keywords are fields of GenerateRequest, `sampling` a dict."""
        (completion,) = (await self.complete(prompt, **fields)).completions
        return completion

    async def complete(self, prompt: list[int], **fields: Any) -> generation_pb2.CompleteResponse:
        request = generation_pb2.CompleteRequest(request=request_of(prompt, **fields))
        response: generation_pb2.CompleteResponse = await self.stub.Complete(request)
        return response


def request_of(prompt: list[int], **fields: Any) -> generation_pb2.GenerateRequest:
    sampling = generation_pb2.SamplingParameters(**fields.pop("sampling", {}))
    if fields.pop("plain", False):
        fields["speculation"] = generation_pb2.SpeculationPolicy(mode=generation_pb2.SPECULATION_MODE_OFF)
    return generation_pb2.GenerateRequest(tokens=generation_pb2.TokenPrompt(ids=prompt), sampling=sampling, **fields)


@asynccontextmanager
async def stack(
    target: Path,
    draft: Path | None,
    *,
    delay: Callable[[], None] | None = None,
    target_delay: Callable[[], None] | None = None,
    draft_engine: Callable[[ModelDirectory], Engine] | None = None,
    patience_seconds: float = 0.02,
    draft_limits: DraftLimits | None = None,
    verifier_limits: VerifierLimits | None = None,
    capacity: int = CAPACITY,
    dtype: str = "float32",
    exact: bool = True,
    verifier_kind: type[VerifierServicer] = VerifierServicer,
    draft_kind: type[DraftServicer] = DraftServicer,
) -> AsyncIterator[Stack]:
    """Verifier, orchestrator and, unless `draft` is None, a draft; `delay` slows the draft's engine,
    `target_delay` the target's. Other kinds of servicers may stand in for the ordinary ones."""
    target_directory = ModelDirectory(target)
    engine: Engine = await asyncio.to_thread(TorchEngine, target_directory, capacity=capacity, dtype=dtype, exact=exact)
    if target_delay is not None:
        engine = SlowEngine(engine, target_delay)
    async with AsyncExitStack() as exits:
        verifier_loop = StepLoop(engine)
        verifier_loop.start()
        verifier = verifier_kind(
            verifier_loop,
            identity_of(target_directory, engine, verifier_loop.context),
            verifier_limits or VerifierLimits(),
        )
        verifier_address, verifier_server = await exits.enter_async_context(served(verifier))
        draft_loop = draft_server = None
        draft_channel = None
        if draft is not None:
            directory = ModelDirectory(draft)
            make = draft_engine or (lambda d: TorchEngine(d, capacity=capacity, exact=False))
            small: Engine = await asyncio.to_thread(make, directory)
            if delay is not None:
                small = SlowEngine(small, delay)
            draft_loop = GrowthLoop(small)
            draft_loop.start()
            service = draft_kind(draft_loop, identity_of(directory, small, capacity), draft_limits or DraftLimits())
            draft_address, draft_server = await exits.enter_async_context(served(service))
            draft_channel = grpc.aio.insecure_channel(draft_address)
        channel = grpc.aio.insecure_channel(verifier_address)
        peers = Peers(channel, draft_channel, patience_seconds=patience_seconds)
        model = model_of(target_directory)
        address, _ = await exits.enter_async_context(served(GenerationServicer(model, peers)))
        channel = await exits.enter_async_context(grpc.aio.insecure_channel(address))
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        yield Stack(address, stub, verifier_loop, draft_loop, draft_server, verifier_server, model, peers)


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for a condition; AssertionError if it does not come true in time."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)
