"""`specdec train-draft` as a process: killed, stopped, out of disk space. Its result is a draft like any other."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from specdec.engine.model_directory import ModelDirectory
from specdec.exit_status import ExitStatus
from specdec.training.files import PLAN, STATE, TEXTS
from tests.models import make, near
from tests.training.processes import run, stopped_when

pytestmark = [pytest.mark.verify, pytest.mark.timeout(1800)]

OPTIONS: tuple[str, ...] = (
    "--text",
    argparse.__file__,
    "--replay",
    json.__file__,
    "--own-tokens",
    "6400",
    "--steps",
    "300",
)
OPTIONS += ("--length", "64", "--rows", "4", "--threads", "1", "--niced")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("pair")
    near(make("llama", made / "target"), made / "draft", noise=0.5)
    return made


def command(folder: Path, out: str, *more: str) -> list[str]:
    return [sys.executable, "-m", "specdec.cli", "train-draft", "target", "draft", out, *OPTIONS, *more]


def test_a_killed_training_ends_with_the_same_draft(folder: Path) -> None:
    """It is killed as soon as it has written each file, and then resumes; without a plan, it begins again."""
    whole = run(folder, *command(folder, "whole"))
    assert (whole.returncode, whole.stdout) == (0, "whole\n"), whole.stderr
    assert "held-out text: acceptance " in whole.stderr
    assert "replay: acceptance " in whole.stderr
    assert "Traceback" not in whole.stderr
    out = folder / "killed"
    for name, more in ((TEXTS, ()), (PLAN, ()), (STATE, ("--resume",)), ("model.safetensors", ("--resume",))):
        had = (out / PLAN).exists()
        assert had == bool(more)
        status = stopped_when((out / name).exists, signal.SIGKILL, folder, *command(folder, "killed", *more))
        assert status == -signal.SIGKILL
        if name == TEXTS and (out / PLAN).exists():  # killed a moment late: undo the plan
            (out / PLAN).unlink()
    other = run(folder, *command(folder, "killed", "--resume", "--seed", "1"))
    assert other.returncode == ExitStatus.USAGE
    assert "was started with --seed 0, cannot be resumed with 1" in other.stderr
    before = (out / STATE).stat().st_mtime_ns
    status = stopped_when(
        lambda: (out / STATE).stat().st_mtime_ns != before,
        signal.SIGINT,
        folder,
        *command(folder, "killed", "--resume"),
    )
    assert status == ExitStatus.INTERRUPTED
    rest = run(folder, *command(folder, "killed", "--resume"))
    assert (rest.returncode, rest.stdout) == (0, "killed\n"), rest.stderr
    assert (out / "model.safetensors").read_bytes() == (folder / "whole" / "model.safetensors").read_bytes()
    assert {file.name for file in out.iterdir()} == {file.name for file in (folder / "whole").iterdir()}


def test_minutes_and_a_full_disk_keep_what_was_learned(folder: Path) -> None:
    status = stopped_when(
        (folder / "short" / STATE).exists, signal.SIGTERM, folder, *command(folder, "short", "--steps", "100000")
    )
    assert status == ExitStatus.TERMINATED
    good = {file.name: file.read_bytes() for file in (folder / "short").iterdir()}
    again = command(folder, "short", "--steps", "100000", "--resume")
    full = run(folder, *again, "--minutes", "0.2", room=400_000)  # less than the state before any step
    assert full.returncode == ExitStatus.FAILED
    assert full.stderr.splitlines()[-1].startswith(f"specdec: short/{STATE}: cannot be written: ")
    assert {file.name: file.read_bytes() for file in (folder / "short").iterdir()} == good
    timed = run(folder, *again, "--minutes", "0.2")
    assert timed.returncode == 0, timed.stderr
    assert "of 100000; the same command with --resume continues" in timed.stderr


def test_what_it_leaves_drafts_for_its_target(folder: Path) -> None:
    """Train from random weights of another architecture, given by its configuration alone."""
    sketch = make("qwen3", folder / "sketch", num_hidden_layers=1)
    for file in sketch.iterdir():
        if file.name != "config.json":
            file.unlink()
    words = [word if word != "draft" else "sketch" for word in command(folder, "made", "--untrained", "--loss", "tv")]
    made = run(folder, *words)
    assert made.returncode == 0, made.stderr
    ModelDirectory(folder / "made").check_pair(ModelDirectory(folder / "target"))
    (folder / "prompts.jsonl").write_text('{"text": "def main("}\n')
    specdec = (sys.executable, "-m", "specdec.cli")
    told = run(
        folder, *specdec, "evaluate", "target", "made", "--prompts", "prompts.jsonl", "--max-tokens", "16",
        "--kv-tokens", "2048", "--streams", "1",
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    exported = run(folder, *specdec, "export", "made", "exported")
    assert exported.returncode == 0, exported.stderr
    assert os.path.getsize(folder / "exported" / "model.onnx")
