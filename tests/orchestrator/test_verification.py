"""Verification: what is logged of verifiers that do not take a text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from orchestrator.peers import Peers
from orchestrator.pods import Pods
from orchestrator.verification import Verification
from specdec.v2 import verifier_pb2, verifier_pb2_grpc
from tests.captured_logs import captured_logs
from tests.orchestrator.samples import context
from tests.stack import until


class Refusing(verifier_pb2_grpc.VerifierServiceServicer):
    """A verifier that ends every session at once. `reasons` are those of the first ones; the last one stays."""

    def __init__(self, *reasons: str) -> None:
        self.reasons = reasons
        self.asked = 0

    async def Verify(self, requests: Any, context: Any) -> None:  # type: ignore[override]
        reason = self.reasons[min(self.asked, len(self.reasons) - 1)]
        self.asked += 1
        await context.abort(grpc.StatusCode.UNAVAILABLE, reason)

    async def FindPrefix(
        self, request: verifier_pb2.FindPrefixRequest, context: Any
    ) -> verifier_pb2.FindPrefixResponse:
        return verifier_pb2.FindPrefixResponse()

    async def GetStats(self, request: Any, context: Any) -> verifier_pb2.GetStatsResponse:
        raise NotImplementedError


@asynccontextmanager
async def serving(verifier: Refusing) -> AsyncIterator[str]:
    server = grpc.aio.server()
    verifier_pb2_grpc.add_VerifierServiceServicer_to_server(verifier, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def test_a_verifier_that_cannot_be_opened_is_told_once_and_when_the_reason_changes() -> None:
    verifier = Refusing("loading", "loading", "ending", "ending")
    async with serving(verifier) as address:
        pods = Pods([address], connect=grpc.aio.insecure_channel)
        verification = Verification(context(Peers(pods)), verifier_pb2.VerifyPolicy())
        with captured_logs() as logs:
            reading = asyncio.create_task(anext(verification.messages()))
            await until(lambda: verifier.asked >= 6)
            reading.cancel()
            await asyncio.wait([reading])
        await pods.close()
    told = [(line["pod"], line["why"]) for line in logs if line["event"] == "verifier_not_opened"]
    assert told == [(address, "UNAVAILABLE: loading"), (address, "UNAVAILABLE: ending")]
