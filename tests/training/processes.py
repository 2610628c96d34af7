"""Trainings as processes: run to their end, or stopped by a signal at a chosen moment."""

from __future__ import annotations

import resource
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from specdec.roles import environment


def run(folder: Path, *words: str, room: int | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder. `room`: maximum bytes of a file that it writes, as on a full disk."""

    def limit() -> None:
        if room is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))

    return subprocess.run(
        words, cwd=folder, env=environment(), capture_output=True, text=True, timeout=600, preexec_fn=limit
    )


def stopped_when(met: Callable[[], bool], by: signal.Signals, folder: Path, *words: str) -> int:
    """Run a command, send it a signal as soon as a condition is met, and return its status."""
    with subprocess.Popen(words, cwd=folder, env=environment(), stdout=subprocess.DEVNULL) as process:
        while not met() and process.poll() is None:
            time.sleep(0.001)
        process.send_signal(by)
        return process.wait(300)
