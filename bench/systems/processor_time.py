"""Processor time during a measurement: of the system under test, of idle systems, and of other processes."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")  # per second
_SAMPLE_SECONDS = 0.5

DISTURBED = 0.2
"""Cores taken by other processes at which a measurement counts as disturbed."""


class Watch:
    """A watch on processor time since its creation.

    Sessions are as in setsid(2): a process and all its descendants. The sessions of the system under test have
    names.
    """

    def __init__(self, system: Mapping[str, int], others: Iterable[int]) -> None:
        self._system, self._others = dict(system), set(others)
        self._begin = self._now()

    def cores(self) -> tuple[dict[str, float], float, float]:
        """Return average cores used so far: (each named session, the other sessions, all other processes)."""
        now, before = self._now(), self._begin
        seconds = now[0] - before[0]
        client, others, all_ = (after - then for after, then in zip(now[2:], before[2:], strict=True))
        mine = {name: taken - before[1][name] for name, taken in now[1].items()}
        strangers = max(0.0, all_ - client - others - sum(mine.values()))
        return {name: taken / seconds for name, taken in mine.items()}, others / seconds, strangers / seconds

    def _now(self) -> tuple[float, dict[str, float], float, float, float]:
        return (
            time.perf_counter(),
            {name: processor_seconds({session}) for name, session in self._system.items()},
            sum(os.times()[:2]),  # of this process, the client
            processor_seconds(self._others),
            _busy_seconds(),
        )


def peak_bytes(session: int) -> int:
    """Return the sum of the peak memory of a session's live processes, even if they peaked at different times."""
    kilobytes = 0
    for process in _members({session}):
        with contextlib.suppress(OSError):
            lines = (process / "status").read_text().splitlines()
            kilobytes += sum(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    return 1024 * kilobytes


def await_quiet(sessions: Iterable[int], cores: float, patience: float) -> float:
    """Wait until processes outside these sessions take less than `cores`, or for `patience` seconds; return their last
    usage."""
    deadline = time.perf_counter() + patience
    sessions = list(sessions)
    while True:
        watch = Watch({}, sessions)
        time.sleep(_SAMPLE_SECONDS)
        taken = watch.cores()[2]
        if taken < cores or time.perf_counter() >= deadline:
            return taken


def processor_seconds(sessions: set[int]) -> float:
    """Return the processor time of the live processes of some sessions so far."""
    ticks = 0
    for process in _members(sessions):
        with contextlib.suppress(OSError):  # it has ended
            ticks += sum(map(int, _fields(process)[11:13]))
    return ticks / _TICKS


def _members(sessions: set[int]) -> Iterator[Path]:
    """Yield the /proc directories of the sessions' processes."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(_fields(process)[3]) in sessions:
                yield process


def _fields(process: Path) -> list[str]:
    """Return the fields of a process's stat starting at field 3, see proc(5)."""
    return (process / "stat").read_text().rsplit(")", 1)[1].split()


def _busy_seconds() -> float:
    """Return busy seconds of all cores, of any process, including time stolen by a hypervisor."""
    user, nice, system, _idle, _wait, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / _TICKS
