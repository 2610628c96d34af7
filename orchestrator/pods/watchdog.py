"""The watchdog: notices a silent peer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

TICKS = 4
"""Ticks in a watchdog's timeout. Silence is counted in ticks of our own event loop instead of clock time: a stall of
the loop counts as one tick, so the peer is not blamed for it."""


class Watchdog:
    """Calls `on_silence` when a listener has received nothing for `seconds`, or up to a tick longer."""

    def __init__(self, seconds: float, on_silence: Callable[[], None]) -> None:
        self._tick_seconds = seconds / TICKS
        self._on_silence = on_silence
        self._listening = False
        self._ticks = 0  # since listening began
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._tick_seconds, self._tick)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Count silence while the context lasts: it wraps a wait for the peer's next message. Silence at other times
        does not count."""
        self._listening, self._ticks = True, 0
        try:
            yield
        finally:
            self._listening = False

    def _tick(self) -> None:
        self._ticks += self._listening
        if self._ticks > TICKS:
            self._on_silence()
        else:
            self.start()
