"""Cancellation: tells a cancelled task from a cancelled call, which grpc.aio reports as if the waiting task were
cancelled."""

from __future__ import annotations

import asyncio


def being_cancelled() -> bool:
    """Return True if this task is being cancelled, rather than the call that it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
