"""The interceptor around every call: applies gates, binds propagated metadata, maps exceptions to statuses.

Streaming handlers are coroutines that write to their context, not generators, so that cancellation ends them
immediately, at their current await.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Sequence
from typing import Any

import grpc
import structlog
from google.protobuf.message import DecodeError

from specdec.serving.callers.guard import ConnectionGuard
from specdec.serving.errors import InternalError, InvalidRequestError, ServiceError, as_service_error, to_status
from specdec.serving.opening import Openings
from specdec.serving.propagation import bind_metadata, bound_request_id
from specdec.serving.validation import MAX_MESSAGE_BYTES

log = structlog.get_logger()

REQUEST_SECONDS = 30.0
"""Seconds for the request of a unary-request call to arrive: a long prompt over a slow link takes some time."""

Context = grpc.aio.ServicerContext[Any, Any]

Metadata = Collection[tuple[str, str | bytes]]
"""A caller's metadata in gRPC's form."""

Gate = Callable[[str, Metadata], None]
"""Refuses a call by raising an error, given the method's full name (as in "/specdec.v2.DraftService/Draft") and the
metadata. Runs before any other work on the call."""

CallerGate = Callable[[Context], None]
"""Refuses a call by raising an error, given its context."""

MAX_REFUSALS = 256
"""Maximum number of cached refusals: building a rich status takes longer than all other Python work of a refusal."""

NO_METHOD = grpc.StatusCode.UNIMPLEMENTED, "Method not found!"
"""gRPC's own status for an unknown method."""


class _NoRequestError(Exception):
    """A unary-request call ended without its request."""


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls, binds the caller's propagated metadata (`propagation.py`), and answers errors with rich statuses.

    A unary-request call is served as a stream of one message. This bounds the wait for the request, and a request that
    cannot be decoded is answered here like any other invalid one.
    """

    def __init__(
        self,
        max_request_bytes: Callable[[], int] = lambda: MAX_MESSAGE_BYTES,
        gates: Sequence[Gate] = (),
        caller_gates: Sequence[CallerGate] = (),
        open_services: Collection[str] = (),
        guard: ConnectionGuard | None = None,
    ) -> None:
        """`max_request_bytes` limits unary requests. Larger ones are refused undecoded, since decoding can hold the
        event loop for half a second. A call must pass all gates. Anyone may call the `open_services`, so calls to them
        do not make the `guard` trust a connection."""
        self._max_request_bytes = max_request_bytes
        self._gates = tuple(gates)
        self._caller_gates = tuple(caller_gates)
        self._open_services = frozenset(open_services)
        self._guard = guard or ConnectionGuard()
        # Keyed by service, so that a caller that may only check health cannot end waiting calls of other services.
        self._openings: defaultdict[str, Openings] = defaultdict(lambda: Openings(REQUEST_SECONDS))
        self._unknown = _stream(self._refusing(*NO_METHOD, (), NO_METHOD[0].name))
        self._refusals: dict[tuple[type[ServiceError], str, str], Callable[..., Awaitable[None]]] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return self._unknown
        method = str(handler_call_details.method)
        metadata: Metadata = handler_call_details.invocation_metadata or ()
        try:
            for gate in self._gates:
                gate(method, metadata)
        except ServiceError as error:
            return _stream(self._refusal(error))
        bind_metadata(dict(metadata))
        service = method[1:].rpartition("/")[0]
        if handler.request_streaming:
            assert handler.response_streaming  # no service here has client-streaming methods with one response
            behaviour, decode = handler.stream_stream, handler.request_deserializer
        else:
            behaviour, decode = handler.unary_stream if handler.response_streaming else handler.unary_unary, None
            behaviour = self._single(
                behaviour,
                handler.request_deserializer,
                self._openings[service],
                answers_once=not handler.response_streaming,
            )
        call = self._open_method(behaviour) if service in self._open_services else self._callers(behaviour)
        return grpc.stream_stream_rpc_method_handler(call, decode, handler.response_serializer)

    def _callers(self, behaviour: Callable[..., Any]) -> Callable[..., Awaitable[None]]:
        """Wrap a method for authorized callers, and report to the guard how their calls end."""

        async def observed(requests: Any, context: Context) -> None:
            running = self._guard.begin(context.peer())
            try:
                await _run(behaviour, requests, context)
            except asyncio.CancelledError:
                self._guard.reset(running)
                raise
            except _NoRequestError:  # a reset may look like this, too
                self._guard.reset(running)
                raise _no_request() from None
            except BaseException:  # answered with an error, hence served
                self._guard.serve(running)
                raise
            self._guard.serve(running)

        answered = guarded(observed)

        async def call(requests: Any, context: Context) -> None:
            try:
                for gate in self._caller_gates:
                    gate(context)
            except ServiceError as error:
                await self._refusal(error)(requests, context)
            else:
                await answered(requests, context)

        return call

    def _open_method(self, behaviour: Callable[..., Any]) -> Callable[..., Awaitable[None]]:
        """Wrap a method that anyone may call."""

        async def counted(requests: Any, context: Context) -> None:
            self._guard.charge_open_call(context.peer())
            try:
                await _run(behaviour, requests, context)
            except _NoRequestError:
                raise _no_request() from None

        return guarded(counted)

    def _refusal(self, error: ServiceError) -> Callable[..., Awaitable[None]]:
        """Return a method that refuses calls with an error without reading their requests."""
        kind = type(error), error.reason, str(error)
        found = self._refusals.get(kind)
        if found is None:
            if len(self._refusals) >= MAX_REFUSALS:
                self._refusals.clear()
            status = to_status(error)
            found = self._refusing(status.code, status.details, status.trailing_metadata, error.reason)
            self._refusals[kind] = found
        return found

    def _refusing(self, code: grpc.StatusCode, details: str, trailing: Any, why: str) -> Callable[..., Awaitable[None]]:
        async def call(requests: Any, context: Context) -> None:
            self._guard.refuse(context.peer(), why)
            context.set_code(code)  # aborting would cost an exception and its traceback
            context.set_details(details)
            context.set_trailing_metadata(trailing)

        return call

    def _single(
        self, behaviour: Callable[..., Any], decode: Callable[[bytes], Any], openings: Openings, *, answers_once: bool
    ) -> Callable[..., Awaitable[None]]:
        """Wrap a unary-request method as one that takes a stream of encoded requests."""

        async def call(requests: AsyncIterator[bytes], context: Context) -> None:
            message = await openings.first(requests)
            if message is None:
                raise _NoRequestError
            if isinstance(reader := aiter(requests), AsyncGenerator):
                # gRPC's server keeps a call, and thus the reader and its message, until the next call.
                await reader.aclose()
            if len(message) > (most := self._max_request_bytes()):
                problem = f"has {len(message)} bytes, must have at most {most}"
                raise InvalidRequestError([("request", problem)])
            try:
                request = decode(message)
            except DecodeError:
                raise InvalidRequestError([("request", "cannot be decoded as this method's request")]) from None
            del message  # a prompt must not be in memory twice while its text is generated
            response = await _run(behaviour, request, context)
            if answers_once:
                await context.write(response)

        return call


class _CallContext:
    """A call's context. A write that fails because the caller has left ends the method like any other cancelled
    call."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def write(self, response: Any) -> None:
        try:
            await self._context.write(response)
        except grpc.aio.InternalError:  # gRPC cancels the method only after it fails a blocked write
            raise asyncio.CancelledError from None


def _no_request() -> InvalidRequestError:
    return InvalidRequestError([("request", "is missing: the call ended without a request")])


async def _run(behaviour: Callable[..., Any], request: Any, context: Context | _CallContext) -> Any:
    """Run a method; return its response, or None if it writes its responses to the context."""
    if not inspect.isasyncgenfunction(behaviour):
        return await behaviour(request, context)
    async for response in behaviour(request, context):  # the style of third-party servicers
        await context.write(response)
    return None


def _stream(call: Callable[..., Awaitable[None]]) -> grpc.RpcMethodHandler[Any, Any]:
    """Return a handler for a method that does not read its messages."""
    return grpc.stream_stream_rpc_method_handler(call)


def guarded(behaviour: Callable[..., Any]) -> Callable[..., Awaitable[None]]:
    """Wrap a streaming method so that its errors are answered with rich statuses."""

    async def call(requests: Any, context: Context) -> None:
        try:
            await _run(behaviour, requests, _CallContext(context))
        except Exception as error:
            await _answer(error, context)

    return call


async def _answer(error: Exception, context: Context) -> None:
    """End the call with the status of an error. Unexpected errors are logged; the caller gets the request id to find
    them."""
    if isinstance(error, grpc.aio.AbortError | grpc.aio.BaseError) or context.cancelled():
        raise error
    mapped = as_service_error(error)
    if isinstance(mapped, InternalError):
        log.error("failed", exc_info=error)
    else:
        log.info("refused", reason=mapped.reason, message=str(mapped))
    await context.abort_with_status(to_status(mapped, bound_request_id()))
