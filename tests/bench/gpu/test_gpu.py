"""A GPU run with stand-ins for its steps: each step has a time limit and its own process, missing parts are reported,
and a report is always written. `python -m bench gpu --device cpu` runs the real steps at a small scale."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.engine import engine
from bench.gpu import gpu
from bench.gpu.needs import missing, modules
from bench.gpu.probe import MODULES, facts
from bench.gpu.results import figures, keep
from bench.gpu.runner import ROOT, Runner
from bench.gpu.steps import STEPS, Command, Place, Step
from bench.speed import config
from testing.processes import alive

WHOLE: dict[str, Any] = {
    "modules": dict.fromkeys(MODULES, "99.0"),
    "gpu": {"name": "Card", "gib": 80.0, "free_gib": 79.0, "capability": "9.0", "cuda": "13.0", "count": 1},
    "driver": "580.1",
    "providers": ["CUDAExecutionProvider", "CPUExecutionProvider"],
    "c_compiler": "/usr/bin/gcc",
    "python_headers": True,
}
"""A machine with everything."""


def stand_in(name: str, script: str, *, seconds: float = 30.0, needs: Sequence[Any] = ()) -> Step:
    def commands(at: Place) -> list[Command]:
        return [["-c", f"folder = {str(at.folder)!r}\n{script}"]]

    return Step(name, f"what {name} does", seconds, tuple(needs), commands)


def needed(has: dict[str, Any], device: str = "cuda") -> list[str]:
    return missing([need for step in STEPS for need in step.needs], has, device)


class TestNeeds:
    def test_nothing_is_missing_where_everything_is(self) -> None:
        assert needed(WHOLE) == []

    @pytest.mark.parametrize(
        ("change", "line"),
        [
            ({"gpu": None, "driver": None}, "a GPU: torch 99.0 sees none (no driver: nvidia-smi does not answer"),
            ({"gpu": None}, "a GPU: torch 99.0 sees none (driver 580.1; torch must be a build for CUDA)"),
            ({"gpu": WHOLE["gpu"] | {"capability": "7.5"}}, "a newer GPU: Card has capability 7.5, 8.0 is needed"),
            ({"c_compiler": None}, "a C compiler: Triton needs gcc or clang"),
            ({"python_headers": False}, "Python.h: Triton needs Python's headers"),
            ({"providers": ["CPUExecutionProvider"]}, "onnxruntime-gpu: this onnxruntime has no CUDAExecutionProvider"),
            ({"modules": WHOLE["modules"] | {"pytest": None}}, "pytest: not installed (pip install pytest)"),
            ({"modules": WHOLE["modules"] | {"torch": "2.8.1+cu128"}}, "torch: version 2.8.1+cu128, at least 2.9 is"),
        ],
    )
    def test_what_is_missing_is_said_in_a_line(self, change: dict[str, Any], line: str) -> None:
        (said,) = needed(WHOLE | change)
        assert said.startswith(line)

    def test_without_torch_the_lack_of_a_gpu_is_not_said_as_well(self) -> None:
        (said,) = needed(WHOLE | {"gpu": None, "modules": WHOLE["modules"] | {"torch": None}})
        assert said == "torch: not installed (pip install torch)"

    def test_a_small_card_lacks_memory_for_large_models_only(self) -> None:
        has = WHOLE | {"gpu": WHOLE["gpu"] | {"free_gib": 12.0}}
        lacking = {step.name for step in STEPS if missing(step.needs, has, "cuda")}
        assert lacking == {"speed", "kernels", "large-engine"}

    def test_a_rehearsal_needs_no_gpu(self) -> None:
        none = WHOLE | {"gpu": None, "driver": None, "providers": [], "c_compiler": None, "python_headers": False}
        assert needed(none, "cpu") == []

    def test_each_package_that_a_run_needs_is_looked_for(self) -> None:
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        needed = [
            each for name in ("service", "cli", "orchestrator", "draft", "verifier", "cuda") for each in extras[name]
        ]
        names = {found[0] for each in needed if (found := re.match(r"[\w-]+", each))}
        # transformers imports accelerate for some quantisations, and gguf for GGUF files: no run has these.
        assert names - {"specdec-serve", "accelerate", "gguf"} <= set(MODULES.values())

    def test_this_machine_can_be_asked(self) -> None:
        """Missing modules are reported, and raise nothing."""
        found = facts()
        assert found["modules"]["torch"] is not None
        assert set(found) == set(WHOLE)
        json.dumps(found)


class TestRun:
    def test_steps_run_whatever_became_of_others(self, tmp_path: Path) -> None:
        steps = [
            stand_in("broken", "print('why'); raise SystemExit(3)"),
            stand_in("impossible", "", needs=[modules(["torch"])]),
            stand_in(
                "fine",
                "import json, pathlib\n"
                "pathlib.Path(folder, 'figures.json').write_text(json.dumps({'steps': 7}))\n"
                "pathlib.Path(folder, 'table.md').write_text('| a | b |')",
            ),
        ]
        has = WHOLE | {"modules": WHOLE["modules"] | {"torch": None}}
        broken, impossible, fine = gpu.run(steps, has, "cuda", tmp_path, 60.0)
        assert broken.status == "failed"
        assert broken.reason.startswith("exit status 3 of python")
        assert "why" in broken.log_tail
        assert (impossible.status, impossible.seconds) == ("skipped", 0.0)
        assert impossible.reason == "missing: torch: not installed (pip install torch)"
        assert (fine.status, fine.figures, fine.tables) == ("passed", {"steps": 7}, {"table": "| a | b |"})
        page = (tmp_path / "report.md").read_text()
        assert "Card, 80.0 GiB, capability 9.0, CUDA 13.0; driver 580.1." in page
        assert "| fine | passed |" in page
        assert "- steps: 7" in page
        assert "| a | b |" in page
        assert "why" in page
        report = json.loads((tmp_path / "report.json").read_text())
        assert [step["status"] for step in report["steps"]] == ["failed", "skipped", "passed"]
        assert report["facts"] == has

    def test_a_step_that_takes_too_long_is_interrupted_and_keeps_what_it_has(self, tmp_path: Path) -> None:
        """By a clock that jumps once the step has begun."""
        script = (
            "import pathlib, time\n"
            "try:\n    pathlib.Path(folder, 'begun').touch(); time.sleep(60)\n"
            "except KeyboardInterrupt:\n    pathlib.Path(folder, 'figures.json').write_text('{\"until\": 1}')"
        )
        begun = tmp_path / "slow" / "begun"

        def clock() -> float:
            if not begun.parent.exists():
                return 0.0
            while not begun.exists():
                time.sleep(0.01)
            return 10.0

        runner = Runner(WHOLE, "cuda", tmp_path, 60.0, clock)
        slow, after = map(runner.run, (stand_in("slow", script, seconds=5.0), stand_in("after", "")))
        assert (slow.status, slow.reason, slow.figures) == ("timed out", "it had 5 s", {"until": 1})
        assert after.status == "passed"

    def test_no_step_begins_without_time(self, tmp_path: Path) -> None:
        (late,) = gpu.run([stand_in("late", "")], WHOLE, "cuda", tmp_path, 1.0)
        assert (late.status, late.reason) == ("skipped", "no time was left")

    def test_figures_of_an_earlier_run_are_gone(self, tmp_path: Path) -> None:
        keep(tmp_path / "empty", {"old": 1})
        (empty,) = gpu.run([stand_in("empty", "")], WHOLE, "cuda", tmp_path, 60.0)
        assert empty.figures == {}

    def test_a_rehearsal_interprets_kernels_and_hides_the_gpu(self, tmp_path: Path) -> None:
        script = "import os; assert os.environ['TRITON_INTERPRET'] == '1' and os.environ['CUDA_VISIBLE_DEVICES'] == ''"
        (step,) = gpu.run([stand_in("hidden", script)], WHOLE, "cpu", tmp_path, 60.0)
        assert step.status == "passed"

    @pytest.mark.parametrize(("device", "cores"), [("cpu", 1), ("cuda", len(os.sched_getaffinity(0)))])
    def test_a_rehearsal_takes_one_core(self, device: str, cores: int, tmp_path: Path) -> None:
        script = f"import os; assert len(os.sched_getaffinity(0)) == {cores}"
        (step,) = gpu.run([stand_in("counting", script)], WHOLE, device, tmp_path, 60.0)
        assert step.status == "passed"


def test_counts_of_tests_are_figures(tmp_path: Path) -> None:
    (tmp_path / "tests.xml").write_text(
        '<testsuites><testsuite><testcase classname="a" name="b"/>'
        '<testcase classname="a" name="c"><failure message="x"/></testcase>'
        '<testcase classname="a" name="d"><skipped message="there is no GPU"/></testcase></testsuite></testsuites>'
    )
    assert figures(tmp_path) == {"passed": 1, "failed": ["a::c"], "skipped": {"there is no GPU": 1}}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_options_of_a_step_exist(step: Step, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks the steps whose options this project parses, as far as possible without the device."""
    for module in (engine, config):
        monkeypatch.setattr(module, "check_device", lambda placement: None)
    for command in step.commands(Place(device, tmp_path, tmp_path)):
        assert command[0] == "-m"
        if command[1:3] == ["bench", "engine"]:
            engine.parsed(command[3:])
        elif command[1:3] == ["bench", "speed"]:
            target = command.index("--target") + 1
            command[target] = "demo/target"  # in place of a padded copy of it
            assert config.parsed(command[3:]).device == device


@pytest.mark.parametrize(
    ("given", "what"),
    [
        (["--only", "tests,test"], "--only: test is none of tests, exactness, graphs,"),
        (["--minutes", "0"], "--minutes is 0, must be above 0"),
        (["--device", "tpu"], "argument --device: invalid choice: 'tpu'"),
    ],
)
def test_wrong_options_are_refused(
    given: list[str], what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ending:
        gpu.parsed([*given, "--out", str(tmp_path)])
    assert ending.value.code == 2
    assert what in capsys.readouterr().err


def test_it_starts_without_torch() -> None:
    """Without torch the run must still start, to report that torch is missing."""
    script = "import sys, bench.gpu.gpu; print(*{'torch', 'numpy', 'rich', 'grpc'} & set(sys.modules))"
    assert (
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split() == []
    )


ENDLESS = """
import sys
from bench.gpu import gpu
from tests.bench.gpu.test_gpu import stand_in

script = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
gpu.STEPS = (stand_in("endless", script, seconds=600.0),)
gpu.main(["--device", "cpu", "--only", "endless", "--out", sys.argv[1]])
"""


@pytest.mark.verify
def test_a_run_that_is_told_to_end_ends_its_step(tmp_path: Path) -> None:
    log = tmp_path / "endless" / "log.txt"
    with subprocess.Popen([sys.executable, "-c", ENDLESS, str(tmp_path)], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        assert any(line.startswith("endless: ") for line in run.stdout)
        deadline = time.monotonic() + 60
        while not (log.is_file() and log.read_text().endswith("\n") and log.read_text().split()[-1].isdecimal()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        step = int(log.read_text().split()[-1])
        run.terminate()
        assert run.wait(60) == 143
    assert not alive(step)
