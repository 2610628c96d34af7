"""`specdec up` as a process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testing.processes import alive, children_of


@dataclass(frozen=True)
class Up:
    """The running command, and its description of the services."""

    process: subprocess.Popen[str]
    described: dict[str, Any]

    @property
    def address(self) -> str:
        return str(self.described["address"])

    @property
    def children(self) -> list[int]:
        return children_of(self.process.pid)

    def pid_of(self, module: str) -> int:
        (found,) = [
            pid for pid in self.children if module.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        ]
        return found

    def until_said(self, *words: str) -> str:
        """Return the next line on stderr that has any of these words; skip the lines before it."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if any(each in line for each in words):
                return line
        raise AssertionError(f"it ended without {words!r}")


@contextmanager
def running_up(*options: str) -> Iterator[Up]:
    """Run the command, on free ports, until the context exits. No service may outlive it."""
    command = [sys.executable, "-m", "specdec.cli", "up", "--port", "0", "--json", "--log-level", "error", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            line = process.stdout.readline()
            assert line, process.stderr.read()
            yield Up(process, json.loads(line))
        finally:
            children = children_of(process.pid)
            process.terminate()
            process.wait(20)
        assert process.stdout.read() == ""
    assert not [pid for pid in children if alive(pid)]
