"""A substitute for torchrun: one program in several processes with a rendezvous. They are forked from a process with
slow imports and compilation already done (`tests.faults.pods`), and end with the tests."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from tests.faults.births import PRELOAD
from tests.faults.pods import free_address

PATIENCE_SECONDS = 120.0
"""For a busy machine."""

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Launched:
    """The processes, by rank; their stdout and stderr go to log files."""

    processes: list[ForkServerProcess]
    logs: list[Path]

    def said(self, rank: int) -> str:
        return self.logs[rank].read_text(errors="replace")

    def until_said(self, rank: int, words: str, *, times: int = 1, running: bool = True) -> str:
        """Wait for the `times`-th line containing `words` and return it. With `running`, the rank must be alive
        until then."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            alive = self.processes[rank].is_alive()
            found = [line for line in self.said(rank).splitlines() if words in line]
            if len(found) >= times:
                return found[times - 1]
            assert alive or not running, f"rank {rank} ended without {words!r}:\n{self.said(rank)}"
            assert time.monotonic() < deadline, f"no {words!r} from rank {rank}:\n{self.said(rank)}"
            time.sleep(0.02)

    def exit_codes(self) -> list[int | None]:
        """Return all exit codes, after waiting up to PATIENCE_SECONDS for each process."""
        for process in self.processes:
            process.join(PATIENCE_SECONDS)
        return [process.exitcode for process in self.processes]

    def signal(self, rank: int, number: signal.Signals) -> None:
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)


@contextmanager
def launched(degree: int, logs: Path, program: Callable[..., None], *arguments: Any) -> Iterator[Launched]:
    """Start a program in `degree` processes; kill remaining ones at the end."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(PRELOAD)
    host, port = free_address().split(":")
    common = {"WORLD_SIZE": degree, "LOCAL_WORLD_SIZE": degree, "MASTER_ADDR": host, "MASTER_PORT": port}
    logs.mkdir()
    files = [logs / f"rank-{rank}.log" for rank in range(degree)]
    processes = []
    for rank, file in enumerate(files):
        file.touch()
        place = common | {"RANK": rank, "LOCAL_RANK": rank}
        environment = {name: str(value) for name, value in place.items()}
        processes.append(server.Process(target=_be, args=(file, environment, program, arguments), daemon=True))
    try:
        for process in processes:
            process.start()
        yield Launched(processes, files)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()


def module(name: str, *options: str) -> None:
    """A program: `python -m NAME OPTIONS`."""
    sys.argv = [name, *options]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _be(log: Path, environment: dict[str, str], program: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout, sys.stderr = open(1, "w"), open(2, "w")  # noqa: SIM115 - for good
    os.environ.update(environment)
    program(*arguments)
