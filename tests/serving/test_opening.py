"""Calls without a first message are ended after a timeout; if there are many, the oldest are ended sooner."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from specdec.serving import opening
from specdec.serving.errors import DeadlineError, OverloadedError
from specdec.serving.opening import Openings


async def silence() -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield b""


async def words(*messages: bytes) -> AsyncIterator[bytes]:
    for message in messages:
        yield message


async def test_the_first_message_is_the_first() -> None:
    openings = Openings(5.0)
    requests = words(b"one", b"two")
    assert await openings.first(requests) == b"one"
    assert [message async for message in requests] == [b"two"]


async def test_a_call_may_end_without_one() -> None:
    assert await Openings(5.0).first(words()) is None


async def test_silence_is_ended() -> None:
    with pytest.raises(DeadlineError, match=r"0\.01 s after"):
        await Openings(0.01).first(silence())


async def test_of_too_many_the_oldest_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "MAX_UNOPENED", 3)
    openings = Openings(60.0)
    waiting = [asyncio.create_task(openings.first(silence())) for _ in range(3)]
    await asyncio.sleep(0)  # all are waiting now
    assert await openings.first(words(b"one")) == b"one"
    with pytest.raises(OverloadedError, match="3 later calls"):
        await waiting[0]
    assert not waiting[1].done()
    for task in waiting:
        task.cancel()
