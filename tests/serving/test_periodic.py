"""Periodic work goes on after a failure, and ends when it is closed."""

from __future__ import annotations

import asyncio

from specdec.serving.periodic import Periodic
from tests.captured_logs import captured_logs
from tests.stack import until


async def test_work_is_repeated_after_a_failure() -> None:
    calls = 0

    async def work() -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise ValueError("once")

    periodic = Periodic(work, 0.001, "work_failed")
    with captured_logs() as lines:
        periodic.start()
        await until(lambda: calls > 2)
        await periodic.close()
    assert [line["event"] for line in lines] == ["work_failed"]
    before = calls
    await asyncio.sleep(0.01)
    assert calls == before


async def test_close_waits_until_the_work_has_ended() -> None:
    began, ended = asyncio.Event(), False

    async def work() -> None:
        nonlocal ended
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended = True

    periodic = Periodic(work, 0.0, "work_failed")
    await periodic.close()  # not started: nothing to do
    periodic.start()
    await began.wait()
    await periodic.close()
    assert ended
