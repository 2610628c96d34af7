"""Virtual time advances if and only if all threads are waiting."""

from __future__ import annotations

import asyncio
import time

import pytest

from evaluation import virtual_time


def test_sleeping_takes_virtual_time_only() -> None:
    async def main() -> tuple[float, float]:
        before = time.monotonic()
        await asyncio.sleep(3600.0)
        return before, time.monotonic()

    started = time.monotonic()
    before, after = virtual_time.run(main())
    assert before == pytest.approx(virtual_time.START)
    assert after - before == pytest.approx(3600.0)
    assert time.monotonic() - started < 60.0  # the real clock is restored


def test_timers_come_due_in_order() -> None:
    async def main() -> list[int]:
        order: list[int] = []

        async def note(number: int, seconds: float) -> None:
            await asyncio.sleep(seconds)
            order.append(number)

        await asyncio.gather(note(2, 0.2), note(1, 0.1), note(3, 0.3))
        return order

    assert virtual_time.run(main()) == [1, 2, 3]


def test_waiting_for_nobody_is_an_error() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(virtual_time.DeadlockError):
        virtual_time.run(main())
