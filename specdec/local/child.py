"""A service as a child process. It ends when its stdin closes, so it never outlives the parent, even a killed one."""

from __future__ import annotations

import contextlib
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from specdec.engine.start_phases import ON_STDOUT
from specdec.exit_status import how_it_ended
from specdec.roles import PYTHON, environment

DRAIN_SECONDS = 2.0
"""Default drain deadline in seconds for running requests."""

END_SECONDS = 8.0
"""Seconds after the drain deadline before a service is killed."""


class LocalError(Exception):
    """The services do not run; the message is the reason, in one line for the user."""


@dataclass
class Child:
    """One service process."""

    name: str
    command: tuple[str, ...]
    """Arguments of the interpreter."""

    process: subprocess.Popen[str]
    lines: queue.SimpleQueue[str | None] = field(default_factory=queue.SimpleQueue)

    @classmethod
    def start(cls, name: str, *command: str) -> Child:
        process = subprocess.Popen(
            [*PYTHON, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"TOKENIZERS_PARALLELISM": "false", **environment(), ON_STDOUT: "1"},
            start_new_session=True,  # Ctrl-C goes to the parent, which ends its children in order
        )
        child = cls(name, command, process)

        def pump() -> None:
            assert process.stdout is not None
            with process.stdout:
                for line in process.stdout:
                    child.lines.put(line)
            child.lines.put(None)

        threading.Thread(target=pump, name=f"{name}-stdout", daemon=True).start()
        return child

    def again(self, address: str) -> Child:
        """Restart the service at the same address."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        return Child.start(self.name, *self.command, "--port", address.rpartition(":")[2])

    def ready_at(self, phase_begins: Callable[[str], None] = lambda name: None) -> str | None:
        """Return the address from the service's `ready` line; None if no such line came since the last call.
        `phase_begins` is called with the name of each start-up phase that began."""
        with contextlib.suppress(queue.Empty):
            while (line := self.lines.get_nowait()) is not None:
                what, _, name = line.strip().partition(" ")
                if what == "ready":
                    return name
                if what == "starting":
                    phase_begins(name)
        return None

    def until_ready(self, seconds: float) -> str:
        """Return the service's address once it is ready; LocalError if it ends before, or is not ready within
        `seconds`."""
        deadline = time.monotonic() + seconds
        while (address := self.ready_at()) is None:
            if (how := self.ending()) is not None:
                raise LocalError(f"{self.name} did not start: {how}")
            if time.monotonic() >= deadline:
                raise LocalError(f"{self.name} is not ready after {seconds:g} s")
            time.sleep(0.02)
        return address

    def ending(self) -> str | None:
        """Return how the process ended, for the user; None while it runs."""
        status = self.process.poll()
        return None if status is None else how_it_ended(status)

    @property
    def gave_reason(self) -> bool:
        """True if the process exited with an error, whose reason is on its stderr."""
        return (self.process.poll() or 0) > 0


def stop(
    children: Collection[Child], drain_seconds: float = DRAIN_SECONDS, forced: Callable[[], bool] = lambda: False
) -> None:
    """Stop all services concurrently. Each drains running requests for at most `drain_seconds`. A service that is still
    alive END_SECONDS later, or when `forced` returns True, is killed."""
    alive = [child for child in children if child.process.poll() is None]
    for child in alive:
        child.process.terminate()
    deadline = time.monotonic() + drain_seconds + END_SECONDS
    while any(child.process.poll() is None for child in alive):
        if forced() or time.monotonic() >= deadline:
            for child in alive:
                child.process.kill()
        time.sleep(0.02)
    for child in children:
        if child.process.stdin is not None:
            child.process.stdin.close()
