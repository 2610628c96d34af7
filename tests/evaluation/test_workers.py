"""The services' workers on virtual time."""

from __future__ import annotations

import asyncio
import queue
import signal
import time

import pytest

from evaluation import virtual_time
from evaluation.workers import OnVirtualTime, sleep


class Ticker(OnVirtualTime):
    """Works for a second per turn, then waits for at most ten."""

    def __init__(self) -> None:
        super().__init__("ticker")
        self.turns: list[float] = []

    def turn(self) -> float | None:
        sleep(1.0)
        self.turns.append(time.monotonic() - virtual_time.START)
        return 10.0


def test_a_worker_takes_turns_on_virtual_time() -> None:
    async def main() -> Ticker:
        worker = Ticker()
        worker.start()
        await asyncio.sleep(14.0)  # the worker's second turn ended at 12, and it waits until 22
        assert await worker.call(lambda: "now") == "now"
        await asyncio.sleep(5.0)
        await worker.end()
        return worker

    turns = virtual_time.run(main()).turns
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

    virtual_time.run(main())


def test_an_interrupt_during_a_turn_ends_the_loop() -> None:
    """asyncio cancels the main task on the first Ctrl-C, and raises KeyboardInterrupt on the second, in the turn."""

    class Interrupted(Ticker):
        def turn(self) -> float | None:
            for _ in range(2):
                signal.raise_signal(signal.SIGINT)
            return None

    async def main() -> None:
        Interrupted().start()
        await asyncio.sleep(1.0)

    with pytest.raises(KeyboardInterrupt):
        virtual_time.run(main())
