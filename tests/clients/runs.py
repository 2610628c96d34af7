"""A client's check, run against a server, and its result."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self

from tests.clients.checks.__main__ import RESULTS
from tests.clients.checks.uses import SERVER_VARIABLE, Server
from tests.clients.environment import variables

RUN_SECONDS = 600.0
"""Timeout of a check."""


@dataclass(frozen=True)
class Result:
    """The result of a client's check."""

    name: str
    package: str
    version: str
    registry: str
    date: str
    works: list[str] = field(default_factory=list)  # uses
    fails: dict[str, str] = field(default_factory=dict)  # use to error
    problem: str | None = None  # why the check was not run, or did not finish

    @property
    def passed(self) -> bool:
        return bool(self.works) and not self.fails and self.problem is None

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.name}.json").write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, file: Path) -> Self:
        return cls(**json.loads(file.read_text()))


@dataclass(frozen=True)
class Uses:
    """The uses that a check has recorded."""

    works: list[str]
    fails: dict[str, str]
    problem: str | None  # why the check did not finish


def run_check(command: Sequence[str], programs: Path, server: Server, log: Path, seconds: float = RUN_SECONDS) -> Uses:
    """Run a check in an empty folder, which is its home, and write its output to `log`; kill it and its processes after
    `seconds`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(ignore_cleanup_errors=True) as home, log.open("wb") as printed:
        results = Path(home, "results.jsonl")
        process = subprocess.Popen(
            command,
            cwd=home,
            env=variables(programs, Path(home)) | _told(server) | {RESULTS: str(results)},
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        problem = None
        try:
            status = process.wait(seconds)
            if status:
                problem = f"its check ended with status {status}"
        except subprocess.TimeoutExpired:
            problem = f"its check did not end within {seconds:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        lines = results.read_text().splitlines() if results.is_file() else []
    found = [json.loads(line) for line in lines]
    works = [entry["use"] for entry in found if entry["error"] is None]
    fails = {entry["use"]: entry["error"] for entry in found if entry["error"] is not None}
    return Uses(works, fails, problem or (None if found else "its check recorded nothing"))


def _told(server: Server) -> dict[str, str]:
    """Return environment variables that name the server: ours, and those read by clients of OpenAI and Anthropic."""
    return {
        SERVER_VARIABLE: json.dumps(asdict(server)),
        "OPENAI_BASE_URL": server.base,
        "OPENAI_API_BASE": server.base,
        "OPENAI_API_KEY": server.key,
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_API_KEY": server.key,
    }
