"""Pods as processes of this machine, each with a fixed address, to be killed, frozen, drained and restarted.

A pod is `python -m verifier_service` or the like. `births.py` creates the processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import time
from pathlib import Path

from tests.faults.births import Birth, Forked, Process

START_SECONDS = 120.0
SHUTDOWN_SECONDS = 30.0

_dice = random.SystemRandom()
_given: set[int] = set()
_first = 20_000 + 6_000 * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 2)
_PORTS = (_first, _first + 6_000)  # of this process; concurrent test processes use others


class Pod:
    """One pod. `start` starts it, and restarts it after it has ended."""

    def __init__(
        self, name: str, module: str, address: str, options: tuple[str, ...], log: Path, birth: Birth = Forked
    ) -> None:
        self.name = name
        self.address = address
        self.log = log
        self._module = module
        self._options = (*options, "--port", address.rpartition(":")[2], "--stop-with-stdin")
        self._birth = birth
        self._process: Process | None = None
        self._ready = False
        self._ends = False  # its end was requested
        self._drains = False  # its end was requested, after draining

    @property
    def running(self) -> bool:
        """Whether there is a process, ready or not."""
        return self._process is not None and self._process.exit_status is None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def ready(self) -> bool:
        """Whether it takes calls, according to its stdout."""
        if not self._ready and self._process is not None and self.running and (line := self._process.said()):
            assert line == f"ready {self.address}\n".encode(), line
            self._ready = True
        return self._ready and self.running

    @property
    def died(self) -> bool:
        """Whether it ended without request."""
        return self._process is not None and not self.running and not self._ends

    def start(self) -> None:
        assert not self.running, f"{self.name} is running"
        if self._drains:
            assert self._process is not None
            status = self._process.exit_status
            assert status == 0, f"{self.name} drained and ended with {status}"
        self._ready = self._ends = self._drains = False
        self._process = self._birth(self._module, self._options, self.log)

    async def until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not self.ready:
            assert self.running, f"{self.name} did not start:\n{self.log_tail()}"
            assert time.monotonic() < deadline, f"{self.name} is not ready after {START_SECONDS:g} s"
            await asyncio.sleep(0.02)

    async def until_ended(self) -> None:
        async with asyncio.timeout(SHUTDOWN_SECONDS):
            while self.running:
                await asyncio.sleep(0.02)

    def kill(self) -> None:
        self._drains = False
        self._end(signal.SIGKILL)

    def terminate(self) -> None:
        """Drain and end the pod, with exit status 0 (checked by the next `start`) unless it is still starting and has
        no signal handler yet."""
        self._drains = self.ready
        self._end(signal.SIGTERM)

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def log_tail(self, lines: int = 30) -> str:
        with contextlib.suppress(FileNotFoundError):
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        return "(no log)"

    def _end(self, number: signal.Signals) -> None:
        self._ends = True
        self._signal(number)

    def _signal(self, number: signal.Signals) -> None:
        if self.running:
            os.kill(self.pid, number)


def free_port() -> int:
    return int(free_address().rpartition(":")[2])


def free_address() -> str:
    """Return a free address outside the kernel's ephemeral port range, so that no other process gets it by chance while
    the pod loads, or between two runs of the pod."""
    while True:
        port = _dice.randrange(*_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if port not in _given:
                _given.add(port)
                return f"127.0.0.1:{port}"
