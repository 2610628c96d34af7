"""Pods as processes of this machine. Each keeps its address, where it may be killed, frozen, drained and started again.

A pod is `python -m verifier_service` and the like, in all but its birth: it is forked from a process that has
imported and compiled what takes seconds (multiprocessing's fork server). None outlives the tests: the kernel kills it
with the fork server, which ends with its parent, however that dies, and whether or not the pod is frozen.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import multiprocessing
import os
import random
import runpy
import signal
import socket
import sys
import time
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

START_SECONDS = 120.0
SHUTDOWN_SECONDS = 30.0

PRELOAD = ["tests.faults.warm"]

_PR_SET_PDEATHSIG = 1

_dice = random.SystemRandom()
_given: set[int] = set()


class Pod:
    """One of them. It is started by `start`, and may be again after it has ended."""

    def __init__(self, name: str, module: str, address: str, options: tuple[str, ...], log: Path) -> None:
        self.name = name
        self.address = address
        self.log = log
        self._module = module
        self._options = (*options, "--port", address.rpartition(":")[2], "--stop-with-stdin")
        self._process: ForkServerProcess | None = None
        self._stdin: Connection | None = None  # open for as long as it shall live
        self._stdout: Connection | None = None
        self._ready = False
        self._ends = False  # because it was told to
        self._drains = False  # likewise, and may take its time

    @property
    def running(self) -> bool:
        """Whether there is a process, ready or not."""
        return self._process is not None and self._process.is_alive()

    @property
    def pid(self) -> int:
        assert self._process is not None
        assert self._process.pid is not None
        return self._process.pid

    @property
    def ready(self) -> bool:
        """Whether it takes calls, as far as it said."""
        if not self._ready and self._stdout is not None and self.running and self._stdout.poll():
            line = os.read(self._stdout.fileno(), 4096)
            assert line in (b"", f"ready {self.address}\n".encode()), line
            self._ready = bool(line)
        return self._ready and self.running

    @property
    def died(self) -> bool:
        """Whether it ended by itself."""
        return self._process is not None and not self._process.is_alive() and not self._ends

    def start(self) -> None:
        assert not self.running, f"{self.name} is running"
        if self._drains:
            assert self._process is not None
            assert self._process.exitcode == 0, f"{self.name} drained and ended with {self._process.exitcode}"
        server = multiprocessing.get_context("forkserver")
        server.set_forkserver_preload(PRELOAD)
        stdin, self._stdin = server.Pipe(duplex=False)
        self._stdout, stdout = server.Pipe(duplex=False)
        self._ready = self._ends = self._drains = False
        self._process = server.Process(
            target=_be, args=(self._module, self._options, self.log, stdin, stdout), name=self.name, daemon=True
        )
        self._process.start()
        stdin.close()
        stdout.close()

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
        """Ask it to drain and end, which must be with exit status 0 by the time it is started again."""
        self._drains = True
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


def _be(module: str, options: tuple[str, ...], log: Path, stdin: Connection, stdout: Connection) -> None:
    """Become the pod."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()  # Ctrl-C is for the tests, which end their pods themselves
    os.dup2(stdin.fileno(), 0)
    os.dup2(stdout.fileno(), 1)
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    os.closerange(3, 1024)  # among them the end of a pipe by which it would keep the fork server alive
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115 - for good
    sys.argv = [module, *options]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def free_address() -> str:
    """Free now, and not among the ports that the kernel gives to who asks for any: nobody gets it by chance while its
    pod loads, or between two of its lives."""
    while True:
        port = _dice.randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if port not in _given:
                _given.add(port)
                return f"127.0.0.1:{port}"
