"""A pod whose unary answers cannot be decoded is treated like one that does not answer."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import pytest

from orchestrator.pods.peers import Peers
from orchestrator.pods.pods import Pods
from orchestrator.pods.prefix_routing import PrefixAnswers
from orchestrator.pods.readiness import VERIFIER, Readiness
from orchestrator.trace import OrchestratorTraceServicer
from specdec.serving.timeline import Timelines
from specdec.v2 import trace_pb2
from tests.captured_logs import captured_logs
from tests.orchestrator.samples import MODEL
from tests.stack import until

BROKEN = b"\xff\xff"
"""Bytes that cannot be decoded as any message."""


@pytest.fixture
async def garbling() -> AsyncIterator[str]:
    """Yield the address of a server that answers every call with `BROKEN`."""

    class Anything(grpc.GenericRpcHandler):
        def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
            async def answer(request: bytes, context: object) -> bytes:
                return BROKEN

            return grpc.unary_unary_rpc_method_handler(answer)

    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Anything(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


async def test_it_has_nothing_cached(garbling: str) -> None:
    pods = Pods([garbling])
    assert list((await PrefixAnswers().cached_tokens(list(pods), [1, 2])).values()) == [0]
    await pods.close()


async def test_it_is_no_verifier_to_serve_with(garbling: str) -> None:
    pods = Pods([garbling])
    found = Readiness(Peers(pods), MODEL, look_seconds=0.02)
    with captured_logs() as logs:
        await found.start()
        assert not found.ready
        await found.close()
    assert [line["tried"] for line in logs if line["event"] == "no_verifier_reached"] == [
        {garbling: "its response cannot be parsed"}
    ]
    await pods.close()


async def test_its_part_of_a_trace_is_missing(garbling: str) -> None:
    pods, timelines = Pods([garbling]), Timelines()
    servicer = OrchestratorTraceServicer(timelines, lambda: pods)
    told, _ = await servicer._of_pod(garbling, trace_pb2.GetTraceRequest(request_id="r"))
    assert [(part.pod, part.reason) for part in told.missing] == [(garbling, "its response cannot be parsed")]
    await pods.close()


async def test_looking_goes_on_after_a_mistake() -> None:
    class Failing(Readiness):
        looks = 0

        async def _look(self) -> None:
            self.looks += 1
            if self.looks > 1:
                raise RuntimeError(f"mistake in looking for {VERIFIER}")

    found = Failing(Peers(Pods()), MODEL, look_seconds=0.01)
    with captured_logs() as logs:
        await found.start()
        await until(lambda: found.looks > 3)
        await found.close()
    assert {line["event"] for line in logs} == {"look_failed"}
