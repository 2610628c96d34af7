"""`specdec train-heads` as a process, for all kinds of heads: stopped and resumed."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

import pytest

from specdec.exit_status import ExitStatus
from specdec.training.files import PLAN
from tests.models import make
from tests.training.processes import run, stopped_when

pytestmark = [pytest.mark.verify, pytest.mark.timeout(1800)]

OPTIONS = ("--text", argparse.__file__, "--own-tokens", "320", "--steps", "120", "--length", "64", "--rows", "4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("llama", tmp_path_factory.mktemp("target") / "target").parent


@pytest.mark.parametrize(
    ("kind", "others", "own", "guess"),
    [
        ("medusa", "EAGLE-3 heads", ("--heads", "2"), "head 2"),
        ("eagle3", "Medusa heads", ("--ttt-steps", "3"), "guess 3"),
        ("dspark", "Medusa heads", ("--block", "3", "--layers", "1", "--anchors", "8"), "guess 3"),
    ],
)
def test_a_stopped_training_ends_with_the_same_heads(
    kind: str, others: str, own: tuple[str, ...], guess: str, folder: Path
) -> None:
    def command(out: str, *more: str, kind: str = kind, own: tuple[str, ...] = own) -> list[str]:
        return [
            sys.executable, "-m", "specdec.cli", "train-heads", "target", out, "--kind", kind, *own, *OPTIONS, *more
        ]  # fmt: skip

    whole = run(folder, *command(f"{kind}-whole"))
    assert (whole.returncode, whole.stdout) == (0, f"{kind}-whole\n"), whole.stderr
    assert "step 120 of 120, " in whole.stderr
    assert f"{guess}: the target's likeliest token is " in whole.stderr
    assert "Traceback" not in whole.stderr

    out = folder / f"{kind}-stopped"
    for name, more in ((PLAN, ()), ("config.json", ("--resume",))):  # while the target writes, and in training
        status = stopped_when((out / name).exists, signal.SIGINT, folder, *command(out.name, *more))
        assert status == ExitStatus.INTERRUPTED
    other_kind, other_own = ("eagle3", ()) if kind == "medusa" else ("medusa", ())
    other = run(folder, *command(out.name, "--resume", kind=other_kind, own=other_own))
    assert other.returncode == ExitStatus.USAGE
    assert f", not of {others}" in other.stderr
    seed = run(folder, *command(out.name, "--resume", "--seed", "1"))
    assert seed.returncode == ExitStatus.USAGE
    assert "was started with --seed 0, cannot be resumed with 1" in seed.stderr
    rest = run(folder, *command(out.name, "--resume"))
    assert (rest.returncode, rest.stdout) == (0, f"{out.name}\n"), rest.stderr
    for name in ("model.safetensors", "config.json"):
        assert (out / name).read_bytes() == (folder / f"{kind}-whole" / name).read_bytes()
    assert sorted(file.name for file in out.iterdir()) == ["config.json", "model.safetensors"]
