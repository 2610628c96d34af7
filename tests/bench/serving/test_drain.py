"""What clients see of a drain."""

from __future__ import annotations

import asyncio

import pytest

from bench.serving.drain import Streams, Text


@pytest.mark.parametrize(("over", "silence"), [(False, 5.0), (True, 2.0)])
def test_a_text_that_runs_is_silent_until_now(over: bool, silence: float) -> None:
    seen = Streams([Text([1.0, 2.0, 4.0, 5.0], over), Text([9.0])])
    assert seen.longest_silence(1.5, 10.0) == silence
    assert seen.longest_silence(4.0, 4.5) == 0.5


async def test_the_next_piece_of_each_running_text_is_awaited() -> None:
    silent, done = Text([1.0]), Text([1.0], over=True)
    seen = Streams([silent, done])
    waiting = asyncio.create_task(seen.next_pieces(60))
    await asyncio.sleep(0)
    assert not waiting.done()
    silent.times.append(2.0)
    seen.changed.set()
    await waiting
    with pytest.raises(TimeoutError):
        await Streams([silent]).next_pieces(0)
