"""The watchdog detects silence, and only silence."""

from __future__ import annotations

import asyncio
import time

from orchestrator.generation.peer_stream import Watchdog


class Listener:
    def __init__(self, seconds: float) -> None:
        self.on_silence = asyncio.Event()
        self.watch = Watchdog(seconds, self.on_silence.set)
        self.watch.start()


async def test_silence_is_noticed() -> None:
    listener = Listener(0.1)
    begin = time.monotonic()
    with listener.watch.listening():
        await listener.on_silence.wait()
    assert time.monotonic() - begin >= 0.1


async def test_each_word_begins_the_time_anew() -> None:
    listener = Listener(0.4)
    begin = time.monotonic()
    while time.monotonic() - begin < 1.0:
        with listener.watch.listening():
            await asyncio.sleep(0.01)
    assert not listener.on_silence.is_set()
    listener.watch.stop()


async def test_who_does_not_listen_misses_nothing() -> None:
    listener = Listener(0.1)
    await asyncio.sleep(0.5)
    assert not listener.on_silence.is_set()
    listener.watch.stop()


async def test_nobody_is_blamed_for_our_own_standstill() -> None:
    listener = Listener(0.4)
    with listener.watch.listening():
        time.sleep(0.6)  # noqa: ASYNC251 (as when the process is stopped)
        await asyncio.sleep(0.05)
    assert not listener.on_silence.is_set()
    listener.watch.stop()


async def test_it_is_over_when_it_is_stopped() -> None:
    listener = Listener(0.05)
    with listener.watch.listening():
        listener.watch.stop()
        await asyncio.sleep(0.2)
    assert not listener.on_silence.is_set()
