"""A lying verifier: a proxy that alters an honest one's responses and signs them with a matching checksum.

A session's responses can be checked against its request. The choice of the next token cannot: a wrong token with a
right checksum goes unnoticed, so it is not among these lies.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from specdec.serving import checksum
from specdec.v2 import model_pb2, verifier_pb2, verifier_pb2_grpc

Commit = verifier_pb2.Commit
Progress = model_pb2.Heartbeat


class LyingSession:
    """One session: its opening, the honest verifier's responses, and ways to send others."""

    def __init__(self, number: int, opening: verifier_pb2.VerifyOpen, context: Any, honest: Any) -> None:
        self.number = number  # index among the liar's sessions
        self.opening = opening
        self.base = len(opening.prompt_tokens) + len(opening.generated_tokens)
        self.commits = 0  # sent so far
        self.true_commits = int(opening.attempt <= 1)  # sent before it lies, so that there is a text to spoil
        self._checksum = checksum.of_opening(opening)
        self._context = context
        self._honest = honest

    async def responses(self) -> AsyncIterator[verifier_pb2.VerifyResponse]:
        """Yield an honest verifier's responses."""
        async for response in self._honest:
            yield response

    async def say(self, response: verifier_pb2.VerifyResponse | bytes) -> None:
        """Send with a matching checksum."""
        if isinstance(response, verifier_pb2.VerifyResponse) and response.HasField("opened"):
            response.opened.checksum = checksum.of_opening(response.opened)
        if isinstance(response, verifier_pb2.VerifyResponse) and response.HasField("commit"):
            commit = response.commit
            self._checksum = checksum.extended(self._checksum, commit.committed.tokens, commit.finish_reason)
            commit.checksum = self._checksum
            self.base += len(commit.committed.tokens)
            self.commits += 1
        await self._context.write(response)

    async def say_damaged(self, response: verifier_pb2.VerifyResponse) -> None:
        """Send the honest response and checksum with one bit of the model's fingerprint flipped."""
        identity = response.opened.identity
        identity.model_fingerprint = chr(ord(identity.model_fingerprint[0]) ^ 1) + identity.model_fingerprint[1:]
        await self._context.write(response)

    async def commit(self, tokens: list[int], **fields: Any) -> None:
        """Send an invented commit, well-formed except for the fields."""
        news = model_pb2.Committed(base=self.base, tokens=tokens)
        said: dict[str, Any] = {"sources": [model_pb2.TOKEN_SOURCE_PLAIN] * len(tokens), "steps": max(1, len(tokens))}
        said |= fields
        if self.opening.HasField("top_logprobs"):
            said.setdefault("logprobs", [verifier_pb2.TokenLogprobs(chosen=-1.0)] * len(tokens))
        await self.say(verifier_pb2.VerifyResponse(commit=Commit(committed=news, **said)))

    async def progress(self, **fields: Any) -> None:
        await self.say(verifier_pb2.VerifyResponse(heartbeat=Progress(**fields)))

    async def end(self, status: grpc.Status) -> None:
        await self._context.abort_with_status(status)

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        await self._context.abort(code, details)


Lie = Callable[[LyingSession], Awaitable[None]]


class LyingVerifier:
    """A VerifierService that lies in one way about the responses of another."""

    name = "specdec.v2.VerifierService"

    def __init__(self, lie: Lie, honest: str) -> None:
        self._lie = lie
        self._channel = grpc.aio.insecure_channel(honest)
        self.sessions = 0  # count so far

    def register(self, server: Any) -> None:
        """Register with serializers that also take bytes, for undecodable messages."""
        handler = grpc.stream_stream_rpc_method_handler(
            self._verify, verifier_pb2.VerifyRequest.FromString, _serialized
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(self.name, {"Verify": handler}),))
        server.add_registered_method_handlers(self.name, {"Verify": handler})

    async def close(self) -> None:
        await self._channel.close()

    async def _verify(self, requests: AsyncIterator[Any], context: Any) -> None:
        first = await anext(aiter(requests), None)
        if first is None:
            return
        self.sessions += 1
        stub: Any = verifier_pb2_grpc.VerifierServiceStub(self._channel)
        honest = stub.Verify()
        await honest.write(first)
        forwarding = asyncio.create_task(_forward(requests, honest))
        try:
            await self._lie(LyingSession(self.sessions, first.open, context, honest))
        finally:
            forwarding.cancel()
            honest.cancel()


async def _forward(requests: AsyncIterator[Any], honest: Any) -> None:
    try:
        async for request in requests:
            await honest.write(request)
    except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
        pass  # the honest verifier has sent its last message


def _serialized(message: Any) -> bytes:
    return message if isinstance(message, bytes) else bytes(message.SerializeToString())
