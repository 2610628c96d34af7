"""Texts that are read while their pods are killed, frozen or blocked, and compared with an undisturbed run."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from specdec.decoding.noise import sample_seed
from specdec.decoding.query import RequestSampler
from specdec.decoding.sampling import Sampling
from specdec.v2 import generation_pb2, model_pb2, verifier_pb2
from tests.services.conftest import Directories
from tests.stack import Stack, VerifierPod, request_of, stack
from verifier_service.servicer import VerifierServicer

PROMPT = [50, 60, 70, 80, 90]
CONTRASTIVE = model_pb2.ACCEPTANCE_RULE_CONTRASTIVE
GENEROUS = 20.0
"""Timeout in seconds for events that take a moment on an idle machine."""

ALWAYS = generation_pb2.Speculation(drafters=[model_pb2.DRAFTER_REMOTE], forced=True)
WARM = {"temperature": 0.8, "seed": 4}


def slow_target() -> None:
    """Make steps slow enough for failures in mid-stream."""
    time.sleep(0.01)


_undisturbed: dict[tuple[Path, bytes], generation_pb2.Completion] = {}
"""The completions made by `undisturbed`, by target and request."""


async def undisturbed(directories: Directories, **fields: Any) -> generation_pb2.Completion:
    """Return the completion of PROMPT by a verifier that is neither slowed nor disturbed, without speculation. Equal
    fields are run once."""
    plain = fields | {"plain": True}
    key = directories.target, request_of(PROMPT, **plain).SerializeToString(deterministic=True)
    if key not in _undisturbed:
        async with stack(directories.target, None) as services:
            _undisturbed[key] = await services.generate(PROMPT, **plain)
    return _undisturbed[key]


def drafted(responses: list[generation_pb2.GenerateResponse]) -> bool:
    return any(model_pb2.TOKEN_SOURCE_REMOTE_DRAFT in response.sources for response in responses)


class Reader:
    """A stream as its client reads it."""

    def __init__(self, services: Stack, **fields: Any) -> None:
        self._call = services.stub.Generate(request_of(PROMPT, **fields))
        self.responses: list[generation_pb2.GenerateResponse] = []
        self.longest_pause = 0.0

    async def read(self, tokens: int) -> None:
        """Read until this number of tokens has come."""
        while sum(len(r.tokens) for r in self.responses) < tokens:
            await self._one()

    async def rest(self) -> generation_pb2.Completion:
        """Read to the end; return the whole completion."""
        while not self.responses or not self.responses[-1].HasField("finish"):
            await self._one()
        assert await self._call.read() is grpc.aio.EOF
        whole = generation_pb2.Completion(finish=self.responses[-1].finish)
        for response in self.responses:
            whole.text += response.text
            whole.tokens.extend(response.tokens)
            whole.sources.extend(response.sources)
            whole.logprobs.extend(response.logprobs)
        return whole

    def cancel(self) -> None:
        self._call.cancel()

    async def _one(self) -> None:
        begin = time.monotonic()
        response = await self._call.read()
        assert response is not grpc.aio.EOF
        self.longest_pause = max(self.longest_pause, time.monotonic() - begin)
        self.responses.append(response)


def serving(services: Stack) -> int:
    """Return the index of the verifier with the only session."""
    (number,) = (i for i, pod in enumerate(services.verifiers) if pod.loop.stats.running)
    return number


def drafting(services: Stack) -> int:
    """Return the index of the draft with the only session."""
    (number,) = (i for i, pod in enumerate(services.drafts) if pod.drafter.slots_used)
    return number


def sampler(sampling: dict[str, Any]) -> RequestSampler:
    return RequestSampler(Sampling(**(sampling | {"seed": sample_seed(sampling.get("seed", 0), 0)})))


def same(
    directories: Directories,
    want: generation_pb2.Completion,
    got: generation_pb2.Completion,
    sampling: dict[str, Any],
) -> None:
    """Check that two texts look the same to a client, except for ties."""
    directories.oracle.same(PROMPT, list(want.tokens), list(got.tokens), sampler(sampling))
    if list(want.tokens) != list(got.tokens):
        return  # a tie
    assert got.text == want.text
    assert (got.finish.reason, got.finish.stop) == (want.finish.reason, want.finish.stop)
    assert got.finish.usage.prompt_tokens == want.finish.usage.prompt_tokens
    assert got.finish.usage.completion_tokens == want.finish.usage.completion_tokens
    assert len(got.logprobs) == len(want.logprobs)
    for a, b in zip(got.logprobs, want.logprobs, strict=True):
        assert a.chosen == pytest.approx(b.chosen, abs=1e-4)
        assert a.top_logprobs == pytest.approx(list(b.top_logprobs), abs=1e-4)
    assert got.finish.speculation.steps > 0
    assert sum(got.finish.speculation.sources.values()) == len(got.tokens) == len(got.sources)


EXPECTED = frozenset({"draft_back", "draft_paused", "draft_resumed"})


def changes(speculation: generation_pb2.SpeculationStatistics) -> dict[str, int]:
    """Return the failover events by reason, without those for a draft that does not pay, which depend on the
    machine."""
    return {reason: count for reason, count in speculation.failover_events.items() if reason not in EXPECTED}


class Frozen(VerifierServicer):
    """Stops answering completely, like a stopped process; or sends what the test specifies."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.thawed = asyncio.Event()
        self.thawed.set()
        self.changed: Callable[[verifier_pb2.VerifyResponse], verifier_pb2.VerifyResponse] = lambda response: response

    async def run(self, requests: Any, context: Any) -> None:
        through: Any = FrozenContext(self, context)
        await super().run(requests, through)


class FrozenContext:
    def __init__(self, service: Frozen, context: Any) -> None:
        self._service = service
        self._context = context

    def time_remaining(self) -> float | None:
        left: float | None = self._context.time_remaining()
        return left

    async def write(self, response: verifier_pb2.VerifyResponse) -> None:
        await self._service.thawed.wait()
        await self._context.write(self._service.changed(response))


def service_of(services: Stack, number: int) -> Frozen:
    service = services.verifiers[number].service
    assert isinstance(service, Frozen)
    return service


class Gate:
    """Blocks forward passes while closed."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()

    @contextmanager
    def closed(self) -> Iterator[None]:
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()

    def __call__(self) -> None:
        self._open.wait()
        time.sleep(0.005)


class Gates:
    """One gate per verifier thread."""

    def __init__(self) -> None:
        self._gates: dict[threading.Thread, Gate] = {}

    def __call__(self) -> None:
        self._gates.setdefault(threading.current_thread(), Gate())()

    def of(self, pod: VerifierPod) -> Gate:
        (gate,) = (gate for thread, gate in self._gates.items() if thread is pod.loop._thread)
        return gate
