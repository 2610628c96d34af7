"""Who took the processor during a measurement: the subject itself, the ones that should sleep, or strangers."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")  # a second
_SAMPLE_SECONDS = 0.5


class Watch:
    """From its making on. Sessions are those of setsid(2): a process and all that it starts."""

    def __init__(self, subject: Iterable[int], others: Iterable[int]) -> None:
        self._subject, self._others = set(subject), set(others)
        self._begin = self._now()

    def cores(self) -> tuple[float, float]:
        """On average so far: (the others, strangers)."""
        seconds, subject, others, all_ = (now - then for now, then in zip(self._now(), self._begin, strict=True))
        return others / seconds, max(0.0, all_ - subject - others) / seconds

    def _now(self) -> tuple[float, float, float, float]:
        own = sum(os.times()[:2])  # this process is the subject's client
        return (
            time.perf_counter(),
            own + _processor_seconds(self._subject),
            _processor_seconds(self._others),
            _busy_seconds(),
        )


def await_quiet(sessions: Iterable[int], cores: float, patience: float) -> None:
    """Until strangers take less than `cores`, or for `patience` seconds."""
    deadline = time.perf_counter() + patience
    sessions = list(sessions)
    while time.perf_counter() < deadline:
        watch = Watch((), sessions)
        time.sleep(_SAMPLE_SECONDS)
        if watch.cores()[1] < cores:
            return


def _processor_seconds(sessions: set[int]) -> float:
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            fields = stat.read_text().rsplit(")", 1)[1].split()  # from field 3 on, see proc(5)
            if int(fields[3]) in sessions:
                ticks += int(fields[11]) + int(fields[12])
    return ticks / _TICKS


def _busy_seconds() -> float:
    """Of all cores, by anyone, and what a hypervisor took."""
    user, nice, system, _idle, _wait, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / _TICKS
