"""A faulty verifier: a proxy in front of a sound one, which occasionally breaks the protocol.

A verifier decides the tokens, so wrong tokens with a matching checksum go unnoticed. Every other fault of a session
must be noticed, including tokens altered in transit, and may cost at most that session's place.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from typing import Any

import grpc

from specdec.v2 import model_pb2, verifier_pb2, verifier_pb2_grpc

STATUSES = [code for code in grpc.StatusCode if code not in (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT)]


class EndedError(Exception):
    """The rogue ends the stream as if it were complete."""


class RogueVerifier(verifier_pb2_grpc.VerifierServiceServicer):
    """Served by the test's own process."""

    name = "specdec.v2.VerifierService"

    def __init__(self, verifier: str, seed: int) -> None:
        self._channel = grpc.aio.insecure_channel(verifier)
        self._generator = random.Random(seed)
        self.odds = 0.0  # probability of breaking the protocol, per message
        self.broken = 0  # count

    def register(self, server: grpc.aio.Server) -> None:
        verifier_pb2_grpc.add_VerifierServiceServicer_to_server(self, server)

    async def close(self) -> None:
        await self._channel.close()

    async def FindPrefix(
        self, request: verifier_pb2.FindPrefixRequest, context: Any
    ) -> verifier_pb2.FindPrefixResponse:
        return verifier_pb2.FindPrefixResponse(cached_tokens=2**32 - 1)  # to attract all texts

    async def GetStats(self, request: verifier_pb2.GetStatsRequest, context: Any) -> verifier_pb2.GetStatsResponse:
        return verifier_pb2.GetStatsResponse()

    async def Verify(self, request_iterator: AsyncIterator[Any], context: Any) -> None:  # type: ignore[override]
        stub: Any = verifier_pb2_grpc.VerifierServiceStub(self._channel)
        call = stub.Verify()

        async def forward() -> None:
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                async for request in request_iterator:
                    await call.write(request)
                await call.done_writing()

        forwarding = asyncio.create_task(forward())
        try:
            async for response in call:
                for said in await self._instead_of(response, context):
                    await context.write(said)
        except EndedError:
            return
        finally:
            forwarding.cancel()
            call.cancel()

    async def _instead_of(
        self, response: verifier_pb2.VerifyResponse, context: Any
    ) -> list[verifier_pb2.VerifyResponse]:
        """Return the messages to send instead of this one."""
        generator = self._generator
        if generator.random() >= self.odds:
            return [response]
        self.broken += 1
        changed = verifier_pb2.VerifyResponse()
        changed.CopyFrom(response)
        match generator.randrange(11):
            case 0:
                return []
            case 1:
                return [response, response]
            case 2:
                return [verifier_pb2.VerifyResponse(), response]
            case 3:
                await context.abort(generator.choice(STATUSES), "the rogue says so")
            case 4:
                raise EndedError
            case 5:
                await asyncio.Event().wait()  # complete silence
            case 6:
                changed.commit.committed.base += generator.choice((1, 7, 2**31))
            case 7:
                del changed.commit.committed.tokens[:]
            case 8:
                for index, token in enumerate(changed.commit.committed.tokens):
                    changed.commit.committed.tokens[index] = token ^ 1
            case 9:
                changed.commit.finish_reason = generator.choice(model_pb2.FinishReason.values())
            case _:
                changed.commit.sources.append(model_pb2.TOKEN_SOURCE_REMOTE_DRAFT)
        return [changed]
