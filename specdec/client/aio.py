"""The asyncio client. A client belongs to one running event loop; start other processes by spawn, not fork."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from functools import partial
from types import EllipsisType, TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar, Unpack, cast
from weakref import WeakSet

import grpc

from specdec.client.completion import Chunk, Model, Result, read_models, read_result
from specdec.client.endpoint import Endpoint, Metadata
from specdec.client.errors import Cancelled, read
from specdec.client.options import GenerateOptions, Message, takes_options
from specdec.client.request import build_request
from specdec.client.tokenized import Tokenized, build_tokenize_request, read_tokenized
from specdec.client.transcript import Transcript
from specdec.v2.generation_pb2 import (
    CompleteRequest,
    GenerateRequest,
    GenerateResponse,
    GenerationServiceGetStatsRequest,
    GenerationServiceGetStatsResponse,
    ListModelsRequest,
    TokenizeRequest,
)
from specdec.v2.generation_pb2_grpc import GenerationServiceStub
from specdec.wire.cancellation import being_cancelled

if TYPE_CHECKING:
    from specdec.v2.generation_pb2_grpc import GenerationServiceAsyncStub

Request = TypeVar("Request")
Answer = TypeVar("Answer")


class AsyncClient(Endpoint[grpc.aio.Channel]):
    """A client of specdec servers. It can be used again after `close`, with new connections."""

    @takes_options
    def generate(
        self,
        prompt: str | None = None,
        *,
        timeout: float | EllipsisType | None = ...,
        request_id: str | None = None,
        metadata: Sequence[tuple[str, str | bytes]] = (),
        **options: Unpack[GenerateOptions],
    ) -> AsyncStream:
        """Request a completion and stream its chunks. The request is sent immediately.

        `prompt` is text to continue. `timeout` (seconds) replaces the client's own. `request_id` identifies the request
        in the logs and traces of services; the default is the id in the metadata, else a new one. The stream has it.
        `metadata` is sent with this call, and replaces the client's entries with the same keys.
        """
        return self.send(build_request(prompt, **options), timeout=timeout, request_id=request_id, metadata=metadata)

    def send(
        self,
        request: GenerateRequest,
        *,
        timeout: float | EllipsisType | None = ...,
        request_id: str | None = None,
        metadata: Sequence[tuple[str, str | bytes]] = (),
    ) -> AsyncStream:
        """Request a completion with a message from `build_request`. Building a large one takes seconds; do it in a
        thread. The stream takes ownership of the message. Other parameters are as in `generate`."""
        request_id, sent = self._identified(request_id, metadata)
        transcript = Transcript(request, self._retries(timeout))
        over = self._ended_by_closing(asyncio.Event())
        return AsyncStream(partial(self._call, metadata=sent), transcript, request_id, over)

    def renewed(self, credentials: grpc.ChannelCredentials | None) -> Self:
        """Return a client with the same settings but these credentials. It has its own connections, and shares the
        state of the servers (rotation) with this one."""
        other = copy(self)
        other._credentials, other._channels, other._pausing = credentials, {}, WeakSet()
        return other

    @takes_options
    async def complete(
        self,
        prompt: str | None = None,
        *,
        timeout: float | EllipsisType | None = ...,
        request_id: str | None = None,
        metadata: Sequence[tuple[str, str | bytes]] = (),
        **options: Unpack[GenerateOptions],
    ) -> Result:
        """Request a completion and wait until it is complete. The parameters are as in `generate`."""
        request = CompleteRequest(request=build_request(prompt, **options))
        request_id, sent = self._identified(request_id, metadata)
        answer = await self._ask(lambda stub: stub.Complete, request, timeout, sent)
        return replace(read(read_result, answer), request_id=request_id)

    async def models(
        self, *, timeout: float | EllipsisType | None = ..., metadata: Sequence[tuple[str, str | bytes]] = ()
    ) -> list[Model]:
        """Return the models available to requests."""
        answer = await self._ask(lambda stub: stub.ListModels, ListModelsRequest(), timeout, self._with(metadata))
        return read(read_models, answer)

    async def tokenize(
        self,
        prompt: str | None = None,
        *,
        tokens: Sequence[int] | None = None,
        messages: Sequence[Message] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_arguments: Mapping[str, Any] | None = None,
        model: str | None = None,
        add_special: bool | None = None,
        pieces: bool = False,
        text: bool = False,
        timeout: float | EllipsisType | None = ...,
        metadata: Sequence[tuple[str, str | bytes]] = (),
    ) -> Tokenized:
        """Return the tokens of a prompt, as for `generate`, without generating.

        `add_special=False` omits tokens the model expects around plain text (a BOS token, for example). `pieces`
        requests the text and bytes of each token, `text` the text of all of them, with special tokens.
        """
        request = build_tokenize_request(
            model,
            add_special,
            pieces,
            text,
            prompt=prompt,
            tokens=tokens,
            messages=messages,
            tools=tools,
            template_arguments=template_arguments,
        )
        return await self.send_tokenize(request, timeout=timeout, metadata=metadata)

    async def send_tokenize(
        self,
        request: TokenizeRequest,
        *,
        timeout: float | EllipsisType | None = ...,
        metadata: Sequence[tuple[str, str | bytes]] = (),
    ) -> Tokenized:
        """Return the tokens of the prompt of a `TokenizeRequest`, as `tokenize` does."""
        answer = await self._ask(lambda stub: stub.Tokenize, request, timeout, self._with(metadata))
        return read(read_tokenized, answer)

    async def send_stats(
        self,
        request: GenerationServiceGetStatsRequest,
        *,
        timeout: float | EllipsisType | None = ...,
        metadata: Sequence[tuple[str, str | bytes]] = (),
    ) -> GenerationServiceGetStatsResponse:
        """Return the statistics of an orchestrator; AccessDenied unless the caller may see them."""
        return await self._ask(lambda stub: stub.GetStats, request, timeout, self._with(metadata))

    async def close(self) -> None:
        """Cancel all calls and close all connections."""
        for channel in self._end():
            await channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _stub(self, address: str) -> GenerationServiceAsyncStub:
        channel = self._channels.get(address)
        if channel is None:
            asyncio.get_running_loop()  # raises outside a loop, where a channel would belong to another loop
            if self._credentials is None:
                channel = grpc.aio.insecure_channel(address, self._options)
            else:
                channel = grpc.aio.secure_channel(address, self._credentials, self._options)
            self._channels[address] = channel
        return cast("GenerationServiceAsyncStub", GenerationServiceStub(channel))

    def _call(self, address: str, request: GenerateRequest, *, timeout: float | None, metadata: Metadata) -> _Call:
        return self._stub(address).Generate(request, timeout=timeout, metadata=metadata)

    async def _ask(
        self,
        method: Callable[[GenerationServiceAsyncStub], grpc.aio.UnaryUnaryMultiCallable[Request, Answer]],
        request: Request,
        timeout: float | EllipsisType | None,
        metadata: Metadata,
    ) -> Answer:
        retries = self._retries(timeout)
        over = self._ended_by_closing(asyncio.Event())
        while True:
            retries.check_open()
            ask = method(self._stub(retries.address))
            try:
                answer = await ask(request, timeout=retries.seconds_left, metadata=metadata)
            except grpc.RpcError as error:
                pause = retries.pause(error)
            except asyncio.CancelledError as error:
                raise _seen_as(error) from None
            else:
                retries.progressed()
                return answer
            await _pause(pause, over)


async def _pause(seconds: float, over: asyncio.Event) -> None:
    """Wait before the next try of a call; return early once `over` is set."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await over.wait()


class _Call(Protocol):
    """The gRPC call of a stream."""

    def __aiter__(self) -> AsyncIterator[GenerateResponse]: ...

    def cancel(self) -> bool: ...


class _Send(Protocol):
    def __call__(self, address: str, request: GenerateRequest, *, timeout: float | None) -> _Call: ...


class AsyncStream:
    """A stream of the chunks of a completion. Leaving its context cancels an unfinished completion."""

    def __init__(self, send: _Send, transcript: Transcript, request_id: str, over: asyncio.Event) -> None:
        """Send the request; called by `AsyncClient.send`. `over` ends a pause before the next try."""
        self.request_id = request_id
        """Id of the request in logs and traces of the services."""
        self._send = send
        self._transcript = transcript
        self._cancelled = False
        self._over = over
        self._call = self._ask()

    def cancel(self) -> None:
        """Cancel the completion; a pending `anext` raises Cancelled."""
        self._cancelled = True
        self._over.set()
        self._call.cancel()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        while not self._cancelled:
            try:
                return self._transcript.record(await anext(aiter(self._call)))
            except StopAsyncIteration:
                self._transcript.end()
                raise
            except grpc.RpcError as error:
                if self._cancelled:
                    break
                pause = self._transcript.pause(error)
            except asyncio.CancelledError as error:
                closed = not (self._cancelled or being_cancelled())
                self._cancelled = True  # grpc.aio ends a call whose reader is cancelled
                if closed and self._transcript.is_complete:
                    raise StopAsyncIteration from None
                raise _seen_as(error) from None
            if pause is None:
                raise StopAsyncIteration
            try:
                await _pause(pause, self._over)
            except asyncio.CancelledError:
                self._cancelled = True  # as in a read: the broken call is over
                raise
            if not self._cancelled:
                self._call = self._ask()
        raise Cancelled("the stream was cancelled", code=grpc.StatusCode.CANCELLED)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def _ask(self) -> _Call:
        address, request, seconds = self._transcript.ask()
        return self._send(address, request, timeout=seconds)


def _seen_as(error: asyncio.CancelledError) -> BaseException:
    """Return the exception to raise: only a task that was really cancelled may raise CancelledError."""
    return error if being_cancelled() else Cancelled("the call was cancelled", code=grpc.StatusCode.CANCELLED)
