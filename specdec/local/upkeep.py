"""Upkeep of a running stack: restarts dead services at their old addresses, so that clients see only a pause.

It has no thread: the owner of the stack calls `look` periodically.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from specdec.local.child import LocalError
from specdec.local.stack import Stack
from specdec.serving.process.restarts import Restarts


@dataclass
class _Life:
    """The state of one service."""

    restarts: Restarts = field(default_factory=Restarts)
    died_at: float | None = None  # set until it is ready again
    start_at: float | None = None  # set until its restart


class Upkeep:
    """Restarts the services of a stack. `say` gets a line for the user about each death and each return."""

    def __init__(self, stack: Stack, say: Callable[[str], None]) -> None:
        self._stack = stack
        self._say = say
        self._lives = {name: _Life() for name in stack.children}
        for life in self._lives.values():
            life.restarts.ready()

    def look(self) -> None:
        """Restart the services that are due; LocalError if a service died too often."""
        for name, life in self._lives.items():
            self._look_at(name, life)

    def _look_at(self, name: str, life: _Life) -> None:
        child, now = self._stack.children[name], time.monotonic()
        if life.start_at is not None:
            if now >= life.start_at:
                life.start_at = None
                self._stack.children[name] = child.again(self._stack.addresses[name])
        elif (how := child.ending()) is not None:
            pause = life.restarts.died()
            if pause is None:
                raise LocalError(f"{name} died {life.restarts.deaths} times in a row, most recently: {how}")
            self._say(f"{name} died ({how}): it starts again in {pause:g} s")
            life.died_at, life.start_at = life.died_at or now, now + pause
        elif life.died_at is not None and child.ready_at() is not None:
            life.restarts.ready()
            self._say(f"{name} is back at {self._stack.addresses[name]} after {now - life.died_at:.1f} s")
            life.died_at = None
