"""Readiness: SERVING from the first verifier found until the last one has been missing for too long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2_grpc

from orchestrator.pods.peers import Peers
from orchestrator.pods.pods import Pods
from orchestrator.pods.readiness import MAX_FINGERPRINTS, VERIFIER, Readiness
from specdec.serving.process.health import NOT_SERVING, SERVING
from specdec.v2 import model_pb2, verifier_pb2, verifier_pb2_grpc
from tests.captured_logs import captured_logs
from tests.orchestrator.samples import MODEL
from tests.stack import until

IDENTITY = model_pb2.ModelIdentity(
    protocol_version=2, tokenizer_fingerprint=MODEL.tokenizer_fingerprint, context_tokens=MODEL.context
)


class Health(health.aio.HealthServicer):  # type: ignore[misc]
    """Counts its calls."""

    checks = 0

    async def Check(self, request: Any, context: Any) -> Any:
        self.checks += 1
        return await super().Check(request, context)


class Verifier(verifier_pb2_grpc.VerifierServiceServicer):
    """A verifier that reports its identity and health only."""

    def __init__(self) -> None:
        self.identity = IDENTITY
        self.health = Health()
        self.asked = 0

    async def Verify(self, requests: Any, context: Any) -> None:  # type: ignore[override]
        raise NotImplementedError

    async def FindPrefix(
        self, request: verifier_pb2.FindPrefixRequest, context: Any
    ) -> verifier_pb2.FindPrefixResponse:
        return verifier_pb2.FindPrefixResponse()

    async def GetStats(self, request: Any, context: Any) -> verifier_pb2.GetStatsResponse:
        self.asked += 1
        return verifier_pb2.GetStatsResponse(identity=self.identity)


@asynccontextmanager
async def serving(verifier: Verifier, address: str = "127.0.0.1:0") -> AsyncIterator[str]:
    server = grpc.aio.server()
    verifier_pb2_grpc.add_VerifierServiceServicer_to_server(verifier, server)
    health_pb2_grpc.add_HealthServicer_to_server(verifier.health, server)
    await verifier.health.set(VERIFIER, SERVING)
    port = server.add_insecure_port(address)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def readiness(pods: Pods, clock: Clock | None = None) -> AsyncIterator[Readiness]:
    found = Readiness(Peers(pods, failover_seconds=30.0), MODEL, look_seconds=0.02, clock=clock or Clock())
    await found.start()
    try:
        yield found
    finally:
        await found.close()
        await pods.close()


async def test_ready_at_once_where_a_verifier_is_there() -> None:
    verifier = Verifier()
    async with serving(verifier) as address, readiness(Pods([address])) as found:
        assert found.ready
        assert found.reaches_verifier


async def test_not_ready_before_the_first_verifier_however_long_that_takes() -> None:
    clock, verifier = Clock(), Verifier()
    async with serving(verifier) as address:
        pass  # the verifier has gone
    with captured_logs() as logs:
        async with readiness(Pods([address]), clock) as found:
            assert not found.ready
            clock.now += 1000
            assert not found.ready
            async with serving(Verifier(), address):
                await until(lambda: found.ready)
    assert [line["event"] for line in logs] == ["no_verifier_reached", "verifier_reached"]
    assert logs[0]["tried"] == {address: "UNAVAILABLE"}


async def test_a_short_outage_is_a_pause_and_a_long_one_is_told() -> None:
    clock, verifier = Clock(), Verifier()
    async with serving(verifier) as address:
        pods = Pods([address])
        async with readiness(pods, clock) as found:
            await verifier.health.set(VERIFIER, NOT_SERVING)
            await until(lambda: not found.reaches_verifier)
            assert found.ready
            clock.now += 29.9
            assert found.ready
            clock.now += 0.2
            assert not found.ready
            await verifier.health.set(VERIFIER, SERVING)
            await until(lambda: found.ready)


async def test_a_verifier_of_another_model_is_none() -> None:
    verifier = Verifier()
    verifier.identity = model_pb2.ModelIdentity(protocol_version=2, tokenizer_fingerprint="x", context_tokens=64)
    with captured_logs() as logs:
        async with serving(verifier) as address, readiness(Pods([address])) as found:
            assert not found.ready
            verifier.identity = IDENTITY
            await until(lambda: found.ready)
    assert "different tokenizer" in logs[0]["tried"][address]


async def test_only_who_answered_last_is_asked_and_for_its_model_once() -> None:
    first, second = Verifier(), Verifier()
    async with serving(first) as one, serving(second) as two, readiness(Pods([one, two])) as found:
        await until(lambda: first.health.checks > 3)
        assert (second.health.checks, first.asked, second.asked) == (1, 1, 1)
        await first.health.set(VERIFIER, NOT_SERVING)
        await until(lambda: second.health.checks > 3)
        assert found.ready
        assert second.asked == 1


async def test_what_sessions_know_is_not_asked_again() -> None:
    verifier = Verifier()
    async with serving(verifier) as address:
        pods = Pods([address])
        (pod,) = pods
        async with readiness(pods) as found:
            pod.load.report(model_pb2.PodCapacity(room=1), seconds=3600)
            await verifier.health.set(VERIFIER, NOT_SERVING)
            assert await found._reachable({}) is pod


async def test_a_report_does_not_make_a_verifier_fit() -> None:
    """Capacity comes with answers about prefixes too, which verifiers of other models give."""
    verifier = Verifier()
    verifier.identity = model_pb2.ModelIdentity(protocol_version=2, tokenizer_fingerprint="x", context_tokens=64)
    async with serving(verifier) as address:
        pods = Pods([address])
        (pod,) = pods
        pod.load.report(model_pb2.PodCapacity(room=1), seconds=3600)
        async with readiness(pods) as found:
            assert not found.ready


async def test_a_verifier_whose_address_goes_away_while_it_is_asked_is_none() -> None:
    class Slow(Health):
        async def Check(self, request: Any, context: Any) -> Any:
            asked.set()
            await asyncio.Event().wait()

    asked, verifier = asyncio.Event(), Verifier()
    verifier.health = Slow()
    async with serving(verifier) as address:
        pods = Pods([address])
        found = Readiness(Peers(pods), MODEL)
        looking = asyncio.create_task(found.start())
        await asked.wait()
        pods.become([])
        await pods.close_idle()
        await looking
        assert not found.ready
        await found.close()


def test_only_the_latest_fingerprints_are_remembered() -> None:
    """A verifier reporting a new fingerprint each time must not fill memory."""
    found = Readiness(Peers(Pods()), MODEL)
    for number in range(2 * MAX_FINGERPRINTS):
        found.served("ours")
        found.served(str(number))
    assert found.knows("ours")
    assert found.knows(str(2 * MAX_FINGERPRINTS - 1))
    assert not found.knows("0")
