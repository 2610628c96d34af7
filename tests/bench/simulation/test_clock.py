from __future__ import annotations

import asyncio
import queue
import time

import pytest

from bench.simulation import clock
from bench.simulation.workers import OnVirtualTime, sleep


def test_sleeping_takes_virtual_time_only() -> None:
    async def main() -> tuple[float, float]:
        before = time.monotonic()
        await asyncio.sleep(3600.0)
        return before, time.monotonic()

    started = time.monotonic()
    before, after = clock.run(main())
    assert before == pytest.approx(clock.START)
    assert after - before == pytest.approx(3600.0)
    assert time.monotonic() - started < 60.0  # and the real clock is back


def test_timers_come_due_in_order() -> None:
    async def main() -> list[int]:
        order: list[int] = []

        async def note(number: int, seconds: float) -> None:
            await asyncio.sleep(seconds)
            order.append(number)

        await asyncio.gather(note(2, 0.2), note(1, 0.1), note(3, 0.3))
        return order

    assert clock.run(main()) == [1, 2, 3]


def test_waiting_for_nobody_is_an_error() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(clock.DeadlockError):
        clock.run(main())


class Ticker(OnVirtualTime):
    """Works for a second a turn, then waits for at most ten."""

    def __init__(self) -> None:
        super().__init__("ticker")
        self.turns: list[float] = []

    def turn(self) -> float | None:
        sleep(1.0)
        self.turns.append(time.monotonic() - clock.START)
        return 10.0


def test_a_worker_takes_turns_on_virtual_time() -> None:
    async def main() -> Ticker:
        worker = Ticker()
        worker.start()
        await asyncio.sleep(14.0)  # its second turn ended at 12; it waits until 22
        assert await worker.call(lambda: "now") == "now"
        await asyncio.sleep(5.0)
        await worker.end()
        return worker

    turns = clock.run(main()).turns
    assert turns == pytest.approx([1.0, 12.0, 15.0])


def test_what_a_worker_raises_is_the_callers() -> None:
    def fail() -> None:
        raise queue.Empty

    async def main() -> None:
        worker = Ticker()
        worker.start()
        with pytest.raises(queue.Empty):
            await worker.call(fail)
        await worker.end()

    clock.run(main())
