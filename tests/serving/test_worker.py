"""A dying worker ends its process, even if everything else fails."""

from __future__ import annotations

import subprocess
import sys

from specdec.exit_status import ExitStatus

SCRIPT = """
import sys, threading
from specdec.serving import worker
from specdec.serving.process import logs

class Doomed(worker.Worker):
    def turn(self):
        raise {error}

{log}
Doomed("doomed").start()
threading.Event().wait(60)
"""


MISTAKE = "RuntimeError('a mistake')"


def exit_status(log: str, stderr: str | int, error: str = MISTAKE) -> int:
    """Return the exit status of a process that runs the code `log`, and whose worker then raises `error`."""
    command = [sys.executable, "-c", SCRIPT.format(log=log, error=error)]
    if isinstance(stderr, int):
        return subprocess.run(command, stderr=stderr, timeout=60, check=False).returncode
    with open(stderr, "w") as sink:
        return subprocess.run(command, stderr=sink, timeout=60, check=False).returncode


def test_a_dead_worker_ends_its_process() -> None:
    assert exit_status("logs.configure('test')", subprocess.DEVNULL) == ExitStatus.INTERNAL


def test_it_ends_where_nothing_can_be_logged() -> None:
    assert exit_status("logs.configure('test')", "/dev/full") == ExitStatus.INTERNAL


def test_it_ends_where_logging_raises() -> None:
    """A different logger might raise."""
    assert exit_status("worker.log = None", subprocess.DEVNULL) == ExitStatus.INTERNAL


def test_a_shortage_of_memory_has_a_status_of_its_own() -> None:
    """It is a condition of the machine, not a bug. Its status does not depend on whether it can be logged."""
    for log in ("logs.configure('test')", "worker.log = None"):
        assert exit_status(log, subprocess.DEVNULL, "MemoryError('of a step')") == ExitStatus.SHORT_OF_MEMORY
