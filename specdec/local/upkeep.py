"""Upkeep of a running stack: restarts dead services at their old addresses, so that clients see only a pause.

It has no thread: the owner of the stack calls `look` periodically.
"""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from specdec.local.child import Child, LocalError
from specdec.local.stack import Stack
from specdec.serving.process.restarts import Restarts


def memory_kills(statistics: Path = Path("/proc/vmstat")) -> int:
    """Return the number of OOM kills on this machine, those in containers included; 0 if unknown."""
    with contextlib.suppress(OSError):
        lines = (line.split() for line in statistics.read_text().splitlines())
        return next((int(value) for name, value in lines if name == "oom_kill"), 0)
    return 0


RECENT_SECONDS = 5.0
"""A service that dies by SIGKILL within this many seconds of an OOM kill, anywhere on the machine, counts as
OOM-killed."""


@dataclass
class _Life:
    """The state of one service."""

    restarts: Restarts = field(default_factory=Restarts)
    died_at: float | None = None  # set until it is ready again
    start_at: float | None = None  # set until its restart


class Upkeep:
    """Restarts the services of a stack. `say` receives a line for the user about each death and each return.

    An OOM-killed service is not restarted if its KV cache has a fixed size, since it would be killed again.
    `memory_kills` returns the number of OOM kills on this machine.
    """

    def __init__(
        self, stack: Stack, say: Callable[[str], None], memory_kills: Callable[[], int] = memory_kills
    ) -> None:
        self._stack = stack
        self._say = say
        self._memory_kills = memory_kills
        self._kills_seen = memory_kills()
        self._killed_at = -math.inf
        self._lives = {name: _Life() for name in stack.children}
        for life in self._lives.values():
            life.restarts.ready()

    def look(self) -> None:
        """Restart the services that are due; LocalError if a service died too often."""
        if (kills := self._memory_kills()) > self._kills_seen:
            self._kills_seen, self._killed_at = kills, time.monotonic()
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
            if self._killed_for_memory(child):
                how = "killed by the system, which was short of memory"
                if sized := _kv_tokens_given(child):
                    raise LocalError(f"{name} was {how}: use fewer than {sized}, or free memory")
            if pause is None:
                raise LocalError(f"{name} died {life.restarts.deaths} times in a row, most recently: {how}")
            self._say(f"{name} died ({how}): it starts again in {pause:g} s")
            life.died_at, life.start_at = life.died_at or now, now + pause
        elif life.died_at is not None and child.ready_at() is not None:
            life.restarts.ready()
            self._say(f"{name} is back at {self._stack.addresses[name]} after {now - life.died_at:.1f} s")
            life.died_at = None

    def _killed_for_memory(self, child: Child) -> bool:
        """Return whether a service died by SIGKILL within RECENT_SECONDS of an OOM kill on this machine."""
        return child.process.poll() == -signal.SIGKILL and time.monotonic() - self._killed_at < RECENT_SECONDS


def _kv_tokens_given(child: Child) -> str | None:
    """Return the option that sets the size of a service's KV cache, with its value; None if the service sizes it."""
    option, command = "--kv-tokens", child.command
    if option not in command[:-1]:
        return None
    last = len(command) - 1 - command[::-1].index(option)
    return f"{option} {command[last + 1]}"
