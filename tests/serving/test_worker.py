"""A worker that dies takes its process with it, whatever else fails."""

from __future__ import annotations

import subprocess
import sys

from specdec.serving.worker import EX_SOFTWARE

SCRIPT = """
import sys, threading
from specdec.serving import worker
from specdec.serving.process import logs

class Doomed(worker.Worker):
    def turn(self):
        raise RuntimeError("a mistake")

{log}
Doomed("doomed").start()
threading.Event().wait(60)
"""


def exit_status(log: str, stderr: str | int) -> int:
    """Of a process whose worker dies, with its logging set up so."""
    command = [sys.executable, "-c", SCRIPT.format(log=log)]
    if isinstance(stderr, int):
        return subprocess.run(command, stderr=stderr, timeout=60, check=False).returncode
    with open(stderr, "w") as sink:
        return subprocess.run(command, stderr=sink, timeout=60, check=False).returncode


def test_a_dead_worker_ends_its_process() -> None:
    assert exit_status("logs.configure('test')", subprocess.DEVNULL) == EX_SOFTWARE


def test_it_ends_where_nothing_can_be_logged() -> None:
    assert exit_status("logs.configure('test')", "/dev/full") == EX_SOFTWARE


def test_it_ends_where_logging_raises() -> None:
    """As another logger than ours may."""
    assert exit_status("worker.log = None", subprocess.DEVNULL) == EX_SOFTWARE
