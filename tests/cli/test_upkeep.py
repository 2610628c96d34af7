"""`specdec up` restarts dead services at their old address: clients notice a pause, and the user sees a line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from specdec.client import Client
from specdec.exit_status import how_it_ended
from specdec.serving.process.restarts import DEATHS
from testing.processes import alive, children_of
from tests.models import make, near

TOKENS = 200

RETRIES = 200
"""Client retries, enough for a restart of the only orchestrator on a busy machine."""

pytestmark = pytest.mark.timeout(900)  # services restart repeatedly, slowly on a busy machine


@dataclass(frozen=True)
class Up:
    process: subprocess.Popen[str]
    address: str

    def pid_of(self, module: str) -> int:
        (found,) = [
            pid
            for pid in children_of(self.process.pid)
            if module.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
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
def up(*options: str) -> Iterator[Up]:
    command = [sys.executable, "-m", "specdec.cli", "up", "--port", "0", "--json", "--log-level", "error", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield Up(process, json.loads(process.stdout.readline())["address"])
        finally:
            children = children_of(process.pid)
            process.terminate()
            process.wait(20)
    assert not [pid for pid in children if alive(pid)]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    root = tmp_path_factory.mktemp("pair")
    target = make("llama", root / "target")
    with up("--target", str(target), "--draft", str(near(target, root / "draft", noise=0.04))) as running:
        yield running


def test_a_client_sees_only_a_pause(running: Up) -> None:
    with Client(running.address, max_retries=RETRIES) as client:

        def text(victim: str | None = None) -> list[int]:
            tokens: list[int] = []
            options = {"max_tokens": TOKENS, "temperature": 0.8, "seed": 3, "ignore_end_token": True}
            with client.generate("hello there", **options) as stream:  # type: ignore[arg-type]
                for chunk in stream:
                    tokens += chunk.tokens
                    if victim is not None:
                        os.kill(running.pid_of(victim), signal.SIGKILL)
                        victim = None
            return tokens

        whole = text()
        assert len(whole) == TOKENS
        for role, module in (
            ("draft", "draft_service"),
            ("verifier", "verifier_service"),
            ("orchestrator", "orchestrator"),
        ):
            assert text(module) == whole, role
            assert running.until_said(f"{role} died ({how_it_ended(-signal.SIGKILL)}): it starts again in 0.25 s")
            assert running.until_said(f"{role} is back at ")
        assert text() == whole


def test_what_dies_in_a_row_ends_all_with_the_reason(running: Up) -> None:
    """The orchestrator's death in the test above may count as the first."""
    kills, line = 0, ""
    while "in a row" not in line:
        os.kill(running.pid_of("orchestrator"), signal.SIGKILL)
        line = running.until_said("orchestrator is back at ", "in a row")
        kills += 1
    assert (
        line == f"specdec: orchestrator died {DEATHS} times in a row, most recently: {how_it_ended(-signal.SIGKILL)}\n"
    )
    assert kills in (DEATHS - 1, DEATHS)
    assert running.process.wait(20) not in (0, None)
