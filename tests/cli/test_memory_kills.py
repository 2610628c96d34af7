"""`specdec up` recognises services killed for lack of memory, and does not restart them with the same KV cache size."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from specdec.local.child import Child, LocalError
from specdec.local.upkeep import Upkeep, memory_kills

SLEEPER = ("-c", "import sys; sys.stdin.read()")


@dataclass
class Machine:
    """A stack with one service that only waits, and the machine's count of memory kills."""

    child: Child
    kills: int = 0
    said: list[str] = field(default_factory=list)

    @property
    def children(self) -> dict[str, Child]:
        return {"verifier": self.child}

    def upkeep(self) -> Upkeep:
        stack: Any = self  # the parts of a Stack that are used
        return Upkeep(stack, self.said.append, lambda: self.kills)

    def kill(self, upkeep: Upkeep, number: signal.Signals = signal.SIGKILL) -> None:
        self.child.process.send_signal(number)
        while self.child.process.poll() is None:
            time.sleep(0.01)
        upkeep.look()


@pytest.fixture
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    child = Child.start("verifier", *SLEEPER, *getattr(request, "param", ()))
    yield Machine(child)
    child.process.kill()
    child.process.wait()
    assert child.process.stdin is not None
    child.process.stdin.close()


def test_a_service_that_sizes_itself_starts_again(machine: Machine) -> None:
    upkeep = machine.upkeep()
    machine.kills += 1
    machine.kill(upkeep)
    (line,) = machine.said
    assert line.startswith("verifier died (killed by the system, which was short of memory): it starts again")


@pytest.mark.parametrize("machine", [("--kv-tokens", "9000", "--kv-tokens", "70000")], indirect=True)
def test_a_given_size_is_not_tried_again(machine: Machine) -> None:
    upkeep = machine.upkeep()
    machine.kills += 1
    with pytest.raises(LocalError, match="short of memory: use fewer than --kv-tokens 70000, or free memory"):
        machine.kill(upkeep)


@pytest.mark.parametrize(("number", "kills"), [(signal.SIGKILL, 0), (signal.SIGSEGV, 1)])
@pytest.mark.parametrize("machine", [("--kv-tokens", "9000")], indirect=True)
def test_another_death_is_another_death(machine: Machine, number: signal.Signals, kills: int) -> None:
    """The service is killed by hand, or crashes while the system kills something else."""
    upkeep = machine.upkeep()
    machine.kills += kills
    machine.kill(upkeep, number)
    (line,) = machine.said
    assert line.startswith(f"verifier died (killed by {number.name}")


@pytest.mark.parametrize("machine", [("--kv-tokens", "9000")], indirect=True)
def test_an_old_kill_of_something_else_is_not_blamed(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    upkeep = machine.upkeep()
    machine.kills += 1
    upkeep.look()
    monkeypatch.setattr(upkeep, "_killed_at", time.monotonic() - 60)
    machine.kill(upkeep)
    (line,) = machine.said
    assert line.startswith("verifier died (killed by SIGKILL")


def test_kills_are_counted(tmp_path: Path) -> None:
    (tmp_path / "vmstat").write_text("pgfault 17\noom_kill 3\n")
    assert memory_kills(tmp_path / "vmstat") == 3
    (tmp_path / "vmstat").write_text("pgfault 17\n")
    assert memory_kills(tmp_path / "vmstat") == 0
    assert memory_kills(tmp_path / "none") == 0
