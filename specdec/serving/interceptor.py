"""One interceptor around every call: request id, and exceptions into statuses.

Streaming handlers are coroutines that write to their context, not generators: a cancelled call then
ends them where they wait, at once.
"""

from __future__ import annotations

import asyncio
import inspect
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import grpc
import structlog
from google.protobuf.message import DecodeError

from specdec.serving.errors import ModelFailureError, ProtocolError, ServiceError, to_status

log = structlog.get_logger()

REQUEST_ID = "x-request-id"


def request_id() -> tuple[tuple[str, str], ...]:
    """The request id of the call being served, as metadata for the calls it makes."""
    bound = structlog.contextvars.get_contextvars().get("request_id")
    return ((REQUEST_ID, bound),) if isinstance(bound, str) else ()


def bind_request_id(metadata: Mapping[str, Any]) -> None:
    """That of the call which is served from here on: its caller's, or a new one."""
    structlog.contextvars.bind_contextvars(request_id=metadata.get(REQUEST_ID) or uuid.uuid4().hex[:16])


Context = grpc.aio.ServicerContext[Any, Any]


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Binds the caller's request id (or a new one) and answers errors with rich statuses."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:  # no such method: gRPC answers
            return handler
        metadata = dict(handler_call_details.invocation_metadata or ())
        bind_request_id(metadata)
        if handler.request_streaming and handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(
                guarded(handler.stream_stream), handler.request_deserializer, handler.response_serializer
            )
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                guarded(handler.unary_stream), handler.request_deserializer, handler.response_serializer
            )
        return grpc.unary_unary_rpc_method_handler(
            guarded(handler.unary_unary), handler.request_deserializer, handler.response_serializer
        )


def guarded(behaviour: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """A handler that answers its errors."""

    async def call(request: Any, context: Context) -> Any:
        try:
            if inspect.isasyncgenfunction(behaviour):  # as others' servicers are written
                async for response in behaviour(request, context):
                    await context.write(response)
                return None
            return await behaviour(request, context)
        except Exception as error:
            return await _answer(error, context)

    return call


async def _answer(error: Exception, context: Context) -> None:
    if isinstance(error, grpc.aio.AbortError | grpc.aio.BaseError) or context.cancelled():
        raise error
    if isinstance(error, ExceptionGroup):
        await _answer(error.exceptions[0], context)
    if isinstance(error, DecodeError):
        error = ProtocolError("a message that cannot be read")
    if isinstance(error, ServiceError):
        log.info("refused", reason=error.reason, message=str(error))
        await context.abort_with_status(to_status(error))
    if isinstance(error, asyncio.TimeoutError):
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline passed")
    log.error("failed", exc_info=error)
    await context.abort_with_status(to_status(ModelFailureError(f"internal error: {type(error).__name__}")))
