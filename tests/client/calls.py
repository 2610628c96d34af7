"""Shared by tests of calls: time limits, refusals by the fake server, and parts of its answers."""

from __future__ import annotations

import asyncio
from typing import Any

from google.rpc import error_details_pb2

from specdec.client import Chunk, Logprobs, Piece
from tests.client.fake_server import Act

BREAK = Act(tokens=0, then="abort")
EVENTUALLY = 10.0  # time limit for a condition, in seconds
ROUNDING = 1.05  # gRPC rounds timeouts up on the wire


async def until(event: asyncio.Event) -> None:
    async with asyncio.timeout(EVENTUALLY):
        await event.wait()


def retry_info(seconds: int, nanos: int = 0) -> Any:
    info = error_details_pb2.RetryInfo()
    info.retry_delay.seconds, info.retry_delay.nanos = seconds, nanos
    return info


def written(chunks: list[Chunk]) -> tuple[str, list[int]]:
    return "".join(chunk.text for chunk in chunks), [token for chunk in chunks for token in chunk.tokens]


def logprobs_of(token: int) -> Logprobs:
    """Return the client's view of the fake server's logprobs; a byte of a longer character has no text."""
    chosen, other = Piece(bytes([token]).decode(errors="replace"), bytes([token])), Piece("\7", b"\7")
    return Logprobs(-0.5, {token: -0.5, 7: -2.0}, chosen, {token: chosen, 7: other})
