"""Creates the processes of pods.

Most are forked from a process that has done the slow imports and compilations (multiprocessing's fork server); pods
that need another environment's interpreter are spawned. No pod outlives the tests, frozen or not: the kernel kills it
with its parent process, and the fork server ends with its own parent, however that dies.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Protocol

from specdec.roles import environment

PRELOAD = ["tests.faults.warm"]

ENDS_WITH_ITS_PARENT = ("setpriv", "--pdeathsig", "KILL")
"""Command prefix to run another program. (A preexec_fn is impossible: gRPC has threads here.)"""

_PR_SET_PDEATHSIG = 1


class Process(Protocol):
    """The process of a pod. Its stdin stays open as long as this object exists."""

    @property
    def pid(self) -> int: ...

    @property
    def exit_status(self) -> int | None:
        """None while it runs."""

    def said(self) -> bytes:
        """Return its stdout since the last call, without blocking."""


Birth = Callable[[str, tuple[str, ...], Path], Process]
"""Runs `python -m MODULE OPTIONS`, with stderr appended to a file."""


class Forked:
    """A child of the fork server."""

    def __init__(self, module: str, options: tuple[str, ...], log: Path) -> None:
        server = multiprocessing.get_context("forkserver")
        server.set_forkserver_preload(PRELOAD)
        stdin, self._stdin = server.Pipe(duplex=False)
        self._stdout, stdout = server.Pipe(duplex=False)
        self._process: ForkServerProcess = server.Process(
            target=_be, args=(module, options, log, stdin, stdout), daemon=True
        )
        self._process.start()
        stdin.close()
        stdout.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        return self._process.exitcode

    def said(self) -> bytes:
        return os.read(self._stdout.fileno(), 4096) if self._stdout.poll() else b""


def _be(module: str, options: tuple[str, ...], log: Path, stdin: Connection, stdout: Connection) -> None:
    """Turn this child process into the pod."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()  # Ctrl-C is for the tests, which end their pods themselves
    os.dup2(stdin.fileno(), 0)
    os.dup2(stdout.fileno(), 1)
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    os.closerange(3, 1024)  # among them a pipe end that would keep the fork server alive
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115 - for good
    sys.argv = [module, *options]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


class Spawned:
    """A process of a given interpreter."""

    def __init__(self, python: Path, module: str, options: tuple[str, ...], log: Path) -> None:
        with log.open("a") as stderr:
            self._process = subprocess.Popen(
                [*ENDS_WITH_ITS_PARENT, python, "-m", module, *options],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**environment(), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"},
                start_new_session=True,
            )
        weakref.finalize(self, _bury, self._process)
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        return self._process.poll()

    def said(self) -> bytes:
        assert self._process.stdout is not None
        try:
            return os.read(self._process.stdout.fileno(), 4096)
        except BlockingIOError:
            return b""


def _bury(process: subprocess.Popen[bytes]) -> None:
    with process:
        process.kill()
