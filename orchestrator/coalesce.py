"""Responses in no more messages than a reader has use for.

A drafted text is committed step by step, since its draft must hear of every one. To tell the client of each as well
takes orchestrator and client half a millisecond, on the cores that small models compute with.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from specdec.v2 import generation_pb2

COALESCE_SECONDS = 0.02
"""Seconds between two messages of a sample, at least. Less than an undrafted commit of a verifier comes after another,
which would else come too early, and wait for the next one."""

Responses = AsyncGenerator[generation_pb2.GenerateResponse, None]


async def coalesced(responses: Responses, seconds: float = COALESCE_SECONDS) -> Responses:
    """Of one sample. The first one goes at once, as does the one that ends it. What comes too early goes with the next,
    or before an error: there is no clock, so that where a text stalls its last hundredths of a second wait as well."""
    pending: generation_pb2.GenerateResponse | None = None
    told = -seconds
    async with aclosing(responses):
        try:
            async for response in responses:
                pending = response if pending is None else _merge(pending, response)
                now = time.monotonic()
                if now - told >= seconds or pending.HasField("finish"):
                    ready, pending, told = pending, None, now
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
    """One response for two. Times are the later one's, but that waits add up."""
    text, steps, offered = first.text + then.text, first.steps + then.steps, first.offered + then.offered
    queued = first.timings.queued_us + then.timings.queued_us
    first.MergeFrom(then)
    first.text, first.steps, first.offered = text, steps, offered
    first.timings.CopyFrom(then.timings)
    first.timings.queued_us = queued
    return first
