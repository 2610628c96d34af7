"""A stream is never silent for long, and sends no superfluous messages."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any, cast

import pytest

from evaluation import virtual_time
from specdec.serving.response_queue import (
    BUSY_HEARTBEAT_SECONDS,
    HEARTBEAT_SECONDS,
    MAX_WAITING,
    MAX_WAITING_BYTES,
    ResponseQueue,
)
from specdec.v2 import draft_pb2, model_pb2
from tests.stack import until

SECONDS = 10.0


class Heard:
    """A stream that records writes as (time, message)."""

    def __init__(self, takes: float = 0.0) -> None:
        self.messages: list[tuple[float, str]] = []
        self._takes = takes

    async def write(self, message: str) -> None:
        await asyncio.sleep(self._takes)
        self.messages.append((asyncio.get_running_loop().time() - virtual_time.START, message))


def heard(every: float, takes: float = 0.0) -> list[tuple[float, str]]:
    """Return what a response queue writes in SECONDS, if a commit is sent every `every` seconds."""

    async def main() -> list[tuple[float, str]]:
        responses: ResponseQueue[str] = ResponseQueue()
        stream: Any = Heard(takes)
        writing = asyncio.create_task(responses.write_to(stream, heartbeat=lambda: "heartbeat"))
        for number in range(1, round(SECONDS / every)):
            await asyncio.sleep(max(0.0, virtual_time.START + number * every - asyncio.get_running_loop().time()))
            responses.send("commit")
        writing.cancel()
        await asyncio.wait([writing])
        messages: list[tuple[float, str]] = stream.messages
        return messages

    return virtual_time.run(main())


@pytest.mark.parametrize("every", [0.01, 0.16, 0.24])
def test_commits_are_signs_of_life(every: float) -> None:
    """Only one heartbeat per second remains, to report the pod's capacity."""
    signs = [0.0, *(when for when, what in heard(every) if what == "heartbeat"), SECONDS]
    pauses = [after - before for before, after in pairwise(signs)]
    assert min(pauses[:-1]) >= 0.99 * BUSY_HEARTBEAT_SECONDS
    assert max(pauses) <= 1.01 * (BUSY_HEARTBEAT_SECONDS + HEARTBEAT_SECONDS)


@pytest.mark.parametrize("every", [0.3, 1.1, 5.0])
def test_a_pause_is_filled(every: float) -> None:
    times = [when for when, _ in heard(every)]
    assert max(after - before for before, after in pairwise([0.0, *times])) <= 1.01 * HEARTBEAT_SECONDS


def test_of_a_stream_that_does_not_take_them_they_are_not_asked() -> None:
    """While messages are pending, heartbeats are superfluous."""
    assert "heartbeat" not in [what for _, what in heard(every=0.1, takes=0.5)]


async def test_a_queue_is_full_by_messages_or_by_bytes() -> None:
    responses: ResponseQueue[draft_pb2.DraftResponse] = ResponseQueue()
    item = draft_pb2.DraftResponse(extend=model_pb2.Extend(logprob_bytes=bytes(MAX_WAITING_BYTES // 3)))
    for full in (False, False, True):
        responses.send(item)
        await asyncio.sleep(0)
        assert responses.full is full
    read = Heard()
    writing = asyncio.create_task(responses.write_to(cast("Any", read), heartbeat=draft_pb2.DraftResponse))
    await until(lambda: len(read.messages) >= 3)
    assert not responses.full
    writing.cancel()
    small: ResponseQueue[draft_pb2.DraftResponse] = ResponseQueue()
    for _ in range(MAX_WAITING):
        assert not small.full
        small.send(draft_pb2.DraftResponse())
        await asyncio.sleep(0)
    assert small.full
