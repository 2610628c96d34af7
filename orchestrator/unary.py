"""Calls of pods that have a single answer."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

from orchestrator.pod_errors import LostError

Answer = TypeVar("Answer")


async def answer_of(call: Awaitable[Answer | None]) -> Answer:
    """Return the answer of a call; LostError if it cannot be read, for which gRPC returns None."""
    answer = await call
    if answer is None:
        raise LostError("its answer cannot be read")
    return answer
