"""A training's folder is locked against other trainings."""

from __future__ import annotations

import fcntl
import os
import sys
from pathlib import Path

import pytest

from specdec.cli.training import take_place
from specdec.exit_status import ExitStatus
from specdec.local import DEMO
from specdec.training.files import PLAN
from tests.training.processes import run


@pytest.mark.parametrize("resume", [[], ["--resume"]], ids=["new", "resumed"])
def test_one_training_at_a_time_writes_to_a_folder(tmp_path: Path, resume: list[str]) -> None:
    (tmp_path / "text").write_text("Some text.")
    (tmp_path / "out").mkdir()
    holder = os.open(tmp_path / "out", os.O_RDONLY)
    try:
        fcntl.flock(holder, fcntl.LOCK_EX)
        command = (sys.executable, "-m", "specdec.cli", "train-heads", str(DEMO / "target"), "out", "--text", "text")
        done = run(tmp_path, *command, *resume)
    finally:
        os.close(holder)
    assert done.returncode == ExitStatus.USAGE
    # gRPC, loaded by other tests, may log a line between fork and exec.
    assert done.stderr.endswith("specdec: out: another training is writing there; wait for it, or write elsewhere\n")


@pytest.mark.parametrize(
    ("file", "why"),
    [
        (PLAN, "has an unfinished training; continue with --resume, or write elsewhere"),
        ("notes.txt", "is not empty; write elsewhere"),
    ],
)
def test_a_folder_in_use_is_refused(file: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / file).write_text("{}")
    with pytest.raises(SystemExit) as end:
        take_place(tmp_path, resume=False, texts=[])
    assert end.value.code == ExitStatus.USAGE
    assert capsys.readouterr().err == f"specdec: {tmp_path}: {why}\n"


def test_what_a_killed_training_left_is_removed(tmp_path: Path) -> None:
    for name in ("texts.safetensors.partial", ".tmp67lKtV"):  # the second one is of safetensors
        (tmp_path / name).write_bytes(b"part")
    take_place(tmp_path, resume=False, texts=[])
    assert {file.name for file in tmp_path.iterdir()} == {"texts.safetensors.partial"}
