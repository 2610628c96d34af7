"""The interceptor around every call: binds what it carries on, and turns exceptions into statuses.

Streaming handlers are coroutines that write to their context, not generators: a cancelled call then ends them where
they wait, at once.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc
import structlog
from google.protobuf.message import DecodeError

from specdec.serving.errors import InternalError, InvalidRequestError, as_service_error, to_status
from specdec.serving.opening import Openings
from specdec.serving.propagation import bind_metadata, bound_request_id
from specdec.serving.validation import MAX_MESSAGE_BYTES

log = structlog.get_logger()

REQUEST_SECONDS = 30.0
"""Seconds for the request of a call with a single one to arrive: a long prompt over a slow line takes some time."""

Context = grpc.aio.ServicerContext[Any, Any]

Gate = Callable[[str, Context], None]
"""Decides whether a call of a method (its full name, as in "/specdec.v2.DraftService/Draft") may be made, before
anything of it is read; raises the error that it is refused with."""


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Binds what the caller's metadata carries on (`propagation.py`), and answers errors with rich statuses.

    A call with a single request is served as a stream of one message: so its wait for the request is bounded, and a
    request that cannot be decoded is answered here, like any other that is wrong.
    """

    def __init__(
        self, max_request_bytes: Callable[[], int] = lambda: MAX_MESSAGE_BYTES, gates: Sequence[Gate] = ()
    ) -> None:
        """Refuse single requests of more than `max_request_bytes` without decoding them, which for some would hold the
        event loop for half a second. A call goes through all `gates`."""
        self._max_request_bytes = max_request_bytes
        self._gates = tuple(gates)
        # By service: who may call but one of them, such as that for health checks, ends no calls of the others.
        self._openings: defaultdict[str, Openings] = defaultdict(lambda: Openings(REQUEST_SECONDS))

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:  # no such method: gRPC answers
            return handler
        bind_metadata(dict(handler_call_details.invocation_metadata or ()))
        method = str(handler_call_details.method)

        def check(context: Context) -> None:
            for gate in self._gates:
                gate(method, context)

        if handler.request_streaming:
            assert handler.response_streaming  # no service here has a method of the fourth kind
            return grpc.stream_stream_rpc_method_handler(
                guarded(handler.stream_stream, check), handler.request_deserializer, handler.response_serializer
            )
        behaviour = handler.unary_stream if handler.response_streaming else handler.unary_unary
        single = self._single(
            behaviour,
            handler.request_deserializer,
            self._openings[method.rpartition("/")[0]],
            answers_once=not handler.response_streaming,
        )
        return grpc.stream_stream_rpc_method_handler(guarded(single, check), None, handler.response_serializer)

    def _single(
        self, behaviour: Callable[..., Any], decode: Callable[[bytes], Any], openings: Openings, *, answers_once: bool
    ) -> Callable[..., Awaitable[None]]:
        """Wrap a method with one request as one with a stream of encoded requests."""

        async def call(requests: AsyncIterator[bytes], context: Context) -> None:
            message = await openings.first(requests)
            if message is None:
                raise InvalidRequestError([("request", "is missing: the call ended without one")])
            if len(message) > (most := self._max_request_bytes()):
                problem = f"has {len(message)} bytes, must have at most {most}"
                raise InvalidRequestError([("request", problem)])
            try:
                request = decode(message)
            except DecodeError:
                raise InvalidRequestError([("request", "cannot be decoded as this method's request")]) from None
            if inspect.isasyncgenfunction(behaviour):  # as others' servicers are written
                async for response in behaviour(request, context):
                    await context.write(response)
                return
            response = await behaviour(request, context)
            if answers_once:
                await context.write(response)

        return call


def guarded(
    behaviour: Callable[..., Any], check: Callable[[Context], None] = lambda context: None
) -> Callable[..., Awaitable[None]]:
    """Wrap the method of a stream so that its errors are answered, and those of `check`, which comes before it."""

    async def call(requests: Any, context: Context) -> None:
        try:
            check(context)
            if inspect.isasyncgenfunction(behaviour):  # as others' servicers are written
                async for response in behaviour(requests, context):
                    await context.write(response)
            else:
                await behaviour(requests, context)
        except Exception as error:
            await _answer(error, context)

    return call


async def _answer(error: Exception, context: Context) -> None:
    """End the call with the status of an error. An error that nobody expected is logged, and its caller gets the id to
    look for."""
    if isinstance(error, grpc.aio.AbortError | grpc.aio.BaseError) or context.cancelled():
        raise error
    if isinstance(error, ExceptionGroup):
        await _answer(error.exceptions[0], context)
    told = as_service_error(error)
    if isinstance(told, InternalError):
        log.error("failed", exc_info=error)
    else:
        log.info("refused", reason=told.reason, message=str(told))
    await context.abort_with_status(to_status(told, bound_request_id()))
