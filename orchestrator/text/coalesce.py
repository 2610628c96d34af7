"""Coalesced responses: merges a sample's messages that follow each other faster than a client can use them.

A drafted text is committed step by step, since its draft must receive every commit. Forwarding each commit to the
client costs orchestrator and client half a millisecond, on cores that small models use too.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from specdec.v2 import generation_pb2

COALESCE_SECONDS = 0.02
"""Shortest interval in seconds between two messages of a sample. It must be shorter than the interval between two
commits of an undrafted text: otherwise each of these commits would be held for the next one."""

ADDED = ("text", "reasoning", "reasoning_tokens", "steps", "offered")
"""Fields of a response to be summed. Lists are joined; other fields, except `timings`, are the same in all responses or
set in one only."""

Responses = AsyncGenerator[generation_pb2.GenerateResponse, None]


async def coalesced(responses: Responses, seconds: float = COALESCE_SECONDS) -> Responses:
    """Yield the responses of one sample, coalesced. The first and the last are sent immediately; any other that arrives
    within `seconds` of the previous message is held, and sent with the next one or before an error. There is no timer:
    while a text stalls, a held response stays held."""
    pending: generation_pb2.GenerateResponse | None = None
    sent_at = -seconds
    async with aclosing(responses):
        try:
            async for response in responses:
                pending = response if pending is None else _merge(pending, response)
                now = time.monotonic()
                if now - sent_at >= seconds or pending.HasField("finish"):
                    ready, pending, sent_at = pending, None, now
                    yield ready
        except Exception:
            if pending is not None:
                yield pending
            raise
    if pending is not None:
        yield pending


def _merge(
    first: generation_pb2.GenerateResponse, then: generation_pb2.GenerateResponse
) -> generation_pb2.GenerateResponse:
    """Merge two responses into one. Times are those of the later one, except that queueing times are summed."""
    sums = {name: getattr(first, name) + getattr(then, name) for name in ADDED}
    queued = first.timings.queued_us + then.timings.queued_us
    first.MergeFrom(then)
    for name, total in sums.items():
        setattr(first, name, total)
    first.timings.CopyFrom(then.timings)
    first.timings.queued_us = queued
    return first
