"""`specdec up` ends if a service dies again and again. In test_local.py services die once, and clients see a pause."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from specdec.exit_status import how_it_ended
from specdec.local import DEMO, PROGRAMS, LocalError, Stack
from specdec.local.upkeep import Upkeep
from specdec.serving.process import restarts
from specdec.serving.process.restarts import DEATHS
from tests.cli.running_up import running_up
from tests.models import make

KILLED = how_it_ended(-signal.SIGKILL)


def keep_killing(name: str, stack: Stack, upkeep: Upkeep) -> None:
    """Kill a service whenever it runs."""
    while True:
        process = stack.children[name].process
        if process.poll() is None:
            process.kill()
            process.wait()
        upkeep.look()
        time.sleep(0.005)


def test_what_dies_in_a_row_is_given_up_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """The services of this stack only pretend to serve."""
    monkeypatch.setattr(restarts, "FIRST_PAUSE_SECONDS", 0.001)
    said: list[str] = []
    with Stack.start(DEMO / "target", "none", programs=dict.fromkeys(PROGRAMS, ("tests.cli.pretends",))) as stack:
        upkeep = Upkeep(stack, said.append, lambda: 0)
        reason = re.escape(f"verifier died {DEATHS} times in a row, most recently: {KILLED}")
        with pytest.raises(LocalError, match=f"^{reason}$"):
            keep_killing("verifier", stack, upkeep)
    assert [line.partition(": ")[0] for line in said] == (DEATHS - 1) * [f"verifier died ({KILLED})"]


@pytest.mark.verify
@pytest.mark.timeout(900)  # services restart repeatedly, slowly on a busy machine
def test_what_dies_in_a_row_ends_all_with_the_reason(tmp_path: Path) -> None:
    with running_up("--target", str(make("llama", tmp_path / "target"))) as running:
        kills, line = 0, ""
        while "in a row" not in line:
            os.kill(running.pid_of("orchestrator"), signal.SIGKILL)
            line = running.until_said("orchestrator is back at ", "in a row")
            kills += 1
        assert line == f"specdec: orchestrator died {DEATHS} times in a row, most recently: {KILLED}\n"
        assert kills == DEATHS
        assert running.process.wait(20) not in (0, None)
