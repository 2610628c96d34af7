"""A hop: the latency of a message from one service to another, without the network.

The latency is the time in two event loops, in gRPC and in the multiplexer: with one stream, about the time of a small
draft's pass. It is measured with an echo service in another process.
"""

from __future__ import annotations

import asyncio
import time
from statistics import median

from evaluation.echo import PATH
from specdec.local.child import Child, stop
from specdec.serving.pods.connections import connect

MESSAGE = bytes(64)
"""About as long as a commit, or a few candidates."""

ROUNDS = 400
WARM_ROUNDS = 50
"""Measured rounds, and warm-up rounds before them."""

PAUSE_SECONDS = 0.002
"""Seconds between two rounds: a service idles during the other's passes, and a message has to wake it."""

START_SECONDS = 30.0


def hop_seconds() -> float:
    """Return the median seconds of a hop; LocalError if the echo does not start."""
    child = Child.start("the echo of messages", "-m", "evaluation.echo")
    try:
        return asyncio.run(_measured(child.until_ready(START_SECONDS)))
    finally:
        stop([child])


async def _measured(address: str) -> float:
    channel = connect(address)
    try:
        call = channel.stream_stream(PATH, bytes, bytes)()
        found: list[float] = []
        for _ in range(WARM_ROUNDS + ROUNDS):
            await asyncio.sleep(PAUSE_SECONDS)
            begin = time.perf_counter()
            await call.write(MESSAGE)
            await call.read()
            found.append((time.perf_counter() - begin) / 2)
        return median(found[WARM_ROUNDS:])
    finally:
        await channel.close()
