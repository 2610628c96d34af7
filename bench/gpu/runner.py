"""Runs the steps of a run on a GPU: each in its own processes, with a time limit, regardless of the outcome of the
others."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bench.gpu.needs import missing
from bench.gpu.probe import Facts
from bench.gpu.results import figures, tables
from bench.gpu.steps import Command, Place, Step

ROOT = Path(__file__).parent.parent.parent

MIN_SECONDS = 5.0
"""Minimum seconds left for a step to begin."""

INTERRUPTED_SECONDS = 10.0
"""Seconds for an interrupted step to write its measurements."""

TAIL_BYTES = 4000
"""Bytes from the end of a step's log in the report."""

Status = Literal["passed", "failed", "timed out", "skipped"]


@dataclass(frozen=True)
class Outcome:
    name: str
    about: str
    status: Status
    seconds: float = 0.0
    reason: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)
    tables: Mapping[str, str] = field(default_factory=dict)
    log_tail: str = ""


class Runner:
    """A run on one device. Its steps share a time budget; each has a folder in `out`, with its log."""

    def __init__(
        self,
        facts: Facts,
        device: str,
        out: Path,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._facts = facts
        self._device = device
        self._out = out
        self._clock = clock
        self._deadline = clock() + seconds

    def run(self, step: Step) -> Outcome:
        """Run one step, if its needs are met and there is time."""
        if lines := missing(step.needs, self._facts, self._device):
            return Outcome(step.name, step.about, "skipped", reason="missing: " + "; ".join(lines))
        begin = self._clock()
        if (left := self._deadline - begin) < MIN_SECONDS:
            return Outcome(step.name, step.about, "skipped", reason="no time was left")
        folder = self._out / step.name
        shutil.rmtree(folder, ignore_errors=True)  # results of an earlier run
        folder.mkdir(parents=True)
        limit = min(step.seconds, left)
        log = folder / "log.txt"
        status, reason = self._commands(step.commands(Place(self._device, folder, self._out)), begin + limit, log)
        if status == "timed out":
            reason = f"it had {limit:.0f} s"
        return Outcome(
            name=step.name,
            about=step.about,
            status=status,
            seconds=round(self._clock() - begin, 1),
            reason=reason,
            figures=figures(folder),
            tables=tables(folder),
            log_tail=_tail(log),
        )

    def _commands(self, commands: list[Command], deadline: float, log: Path) -> tuple[Status, str]:
        with log.open("ab") as to:
            for command in commands:
                to.write(f"$ python {' '.join(command)}\n".encode())
                to.flush()
                with _started([sys.executable, *command], self._environment(), self._cores(), to) as process:
                    try:
                        status = process.wait(max(0.0, deadline - self._clock()))
                    except subprocess.TimeoutExpired:
                        return "timed out", ""
                if status:
                    ended = f"signal {-status}" if status < 0 else f"exit status {status}"
                    return "failed", f"{ended} of python {' '.join(command[:3]).splitlines()[0]}"
        return "passed", ""

    def _environment(self) -> dict[str, str]:
        """Return the environment of a step: offline; on the CPU, kernels interpreted and any GPU hidden."""
        more = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
        if self._device == "cpu":
            more |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
        return os.environ | more

    def _cores(self) -> set[int]:
        """Return the cores of a step; one for a rehearsal, since threads waiting for each other on a busy machine take
        several times as long as one thread."""
        given = os.sched_getaffinity(0)
        return {max(given)} if self._device == "cpu" else given


@contextlib.contextmanager
def _started(
    command: Command, environment: Mapping[str, str], cores: set[int], log: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process in its own group; when the context exits, interrupt it, so that it writes its results, then kill
    its group."""

    def prepare() -> None:
        # Background jobs of a shell ignore SIGINT, and their children inherit that.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.sched_setaffinity(0, cores)

    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=prepare,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(INTERRUPTED_SECONDS)
        with contextlib.suppress(ProcessLookupError):  # the rest of its group, too
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _tail(log: Path) -> str:
    return log.read_bytes()[-TAIL_BYTES:].decode(errors="replace")
