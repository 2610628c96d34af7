"""Unary calls of pods."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc
from google.protobuf.message import Message

from orchestrator.pods.errors import LostError
from specdec.serving.propagation import carried
from specdec.wire.cancellation import being_cancelled

Answer = TypeVar("Answer")


async def answer_of(method: Callable[..., Awaitable[Answer | None]], request: Message, seconds: float) -> Answer:
    """Call a pod, on behalf of the request being served if there is one, and return its answer. Raise AioRpcError if
    none comes within `seconds`, LostError if the answer cannot be decoded (gRPC then returns None) or if the channel is
    closed because the pod's address is gone."""
    try:
        answer = await method(request, timeout=seconds, metadata=carried())
    except asyncio.CancelledError:
        if being_cancelled():
            raise
        raise LostError("its channel was closed") from None
    except grpc.aio.UsageError as error:
        raise LostError("its channel was closed") from error
    if answer is None:
        raise LostError("its response cannot be parsed")
    return answer
