"""The synchronous client. Threads may share one; start other processes by spawn, not fork."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import EllipsisType, TracebackType
from typing import Any, Protocol, Self, TypeVar, Unpack

import grpc

from specdec.client.completion import Chunk, Model, Result, read_models, read_result
from specdec.client.endpoint import Endpoint, Metadata
from specdec.client.errors import Cancelled, read
from specdec.client.options import GenerateOptions, Message, takes_options
from specdec.client.request import build_request
from specdec.client.retries import Retries
from specdec.client.tokenized import Tokenized, build_tokenize_request, read_tokenized
from specdec.client.transcript import Transcript
from specdec.v2.generation_pb2 import CompleteRequest, GenerateRequest, GenerateResponse, ListModelsRequest
from specdec.v2.generation_pb2_grpc import GenerationServiceStub

Request = TypeVar("Request")
Answer = TypeVar("Answer")


class Client(Endpoint[grpc.Channel]):
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
    ) -> Stream:
        """Request a completion and stream its chunks. The request is sent immediately.

        `prompt` is text to continue. `timeout` (seconds) replaces the client's own. `request_id` identifies the request
        in the logs and traces of services; the default is the id in the metadata, else a new one. The stream has it.
        `metadata` is sent with this call, and replaces the client's entries with the same keys.
        """
        request_id, sent = self._identified(request_id, metadata)
        retries = self._retries(timeout)
        transcript = Transcript(build_request(prompt, **options), retries)
        over = self._ended_by_closing(threading.Event())
        return Stream(partial(self._send, retries, metadata=sent), transcript, request_id, over)

    @takes_options
    def complete(
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
        answer = self._ask(lambda stub: stub.Complete, request, timeout, sent)
        return replace(read(read_result, answer), request_id=request_id)

    def models(
        self, *, timeout: float | EllipsisType | None = ..., metadata: Sequence[tuple[str, str | bytes]] = ()
    ) -> list[Model]:
        """Return the models available to requests."""
        answer = self._ask(lambda stub: stub.ListModels, ListModelsRequest(), timeout, self._with(metadata))
        return read(read_models, answer)

    def tokenize(
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
        return read(read_tokenized, self._ask(lambda stub: stub.Tokenize, request, timeout, self._with(metadata)))

    def close(self) -> None:
        """Cancel all calls and close all connections."""
        for channel in self._end():
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _stub(self, retries: Retries, address: str) -> GenerationServiceStub:
        """Return the stub of a server; Cancelled if the client was closed since the call began."""
        with self._lock:
            retries.check_open()  # a channel opened after another thread's `close` would never be closed
            channel = self._channels.get(address)
            if channel is None:
                if self._credentials is None:
                    channel = grpc.insecure_channel(address, self._options)
                else:
                    channel = grpc.secure_channel(address, self._credentials, self._options)
                self._channels[address] = channel
            return GenerationServiceStub(channel)

    def _send(
        self, retries: Retries, address: str, request: GenerateRequest, *, timeout: float | None, metadata: Metadata
    ) -> _Call:
        stub = self._stub(retries, address)
        with _open(retries):
            return stub.Generate(request, timeout=timeout, metadata=metadata)

    def _ask(
        self,
        method: Callable[[GenerationServiceStub], grpc.UnaryUnaryMultiCallable[Request, Answer]],
        request: Request,
        timeout: float | EllipsisType | None,
        metadata: Metadata,
    ) -> Answer:
        retries = self._retries(timeout)
        over = self._ended_by_closing(threading.Event())
        while True:
            ask = method(self._stub(retries, retries.address))
            try:
                with _open(retries):
                    answer = ask(request, timeout=retries.seconds_left, metadata=metadata)
            except grpc.RpcError as error:
                over.wait(retries.pause(error))
            else:
                retries.progressed()
                return answer


@contextmanager
def _open(retries: Retries) -> Iterator[None]:
    """Raise Cancelled in place of the ValueError of a channel that another thread has closed."""
    try:
        yield
    except ValueError:
        retries.check_open()
        raise


class _Call(Protocol):
    """The gRPC call of a stream."""

    def __next__(self) -> GenerateResponse: ...

    def cancel(self) -> bool: ...


class _Send(Protocol):
    def __call__(self, address: str, request: GenerateRequest, *, timeout: float | None) -> _Call: ...


class Stream:
    """A stream of the chunks of a completion. Leaving its context, or dropping it, cancels an unfinished completion."""

    def __init__(self, send: _Send, transcript: Transcript, request_id: str, over: threading.Event) -> None:
        """Send the request; called by `Client.generate`. `over` ends a pause before the next try."""
        self.request_id = request_id
        """Id of the request in logs and traces of the services."""
        self._send = send
        self._transcript = transcript
        self._cancelled = False
        self._over = over
        self._call = self._ask()

    def cancel(self) -> None:
        """Cancel the completion, from any thread; a pending `next` raises Cancelled."""
        self._cancelled = True
        self._over.set()
        self._call.cancel()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        while not self._cancelled:
            try:
                return self._transcript.record(next(self._call))
            except StopIteration:
                self._transcript.end()
                raise
            except grpc.RpcError as error:
                if self._cancelled:
                    break
                pause = self._transcript.pause(error)
            if pause is None:
                raise StopIteration
            self._over.wait(pause)
            if not self._cancelled:
                self._call = self._ask()
        self._call.cancel()  # another thread may have cancelled only the previous call
        raise Cancelled("the stream was cancelled", code=grpc.StatusCode.CANCELLED)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def _ask(self) -> _Call:
        address, request, seconds = self._transcript.ask()
        return self._send(address, request, timeout=seconds)
