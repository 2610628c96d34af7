"""`specdec evaluate` from the command line."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from specdec.exit_status import ExitStatus
from tests.services.conftest import Directories


def evaluate(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "specdec.cli", "evaluate", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def prompts(tmp_path: Path, *lines: object) -> str:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return str(file)


def evaluate_pair(directories: Directories, tmp_path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Evaluate a pair on two short texts, one of them sampled."""
    file = prompts(tmp_path, {"text": "once upon a time"}, {"text": "abc", "temperature": 0.8, "seed": 1})
    pair = (str(directories.target), str(directories.near), "--prompts", file, "--draft-engine", "torch")
    short = ("--max-tokens", "6", "--threads", "1", "--streams", "2", "--concurrent", "8")
    return evaluate(*pair, *short, *options)


def test_it_tells_acceptance_speed_and_pools(directories: Directories, tmp_path: Path) -> None:
    done = evaluate_pair(directories, tmp_path, "--json")
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if "100 %" in line] == ["specdec: evaluate: 100 %"]
    told = json.loads(done.stdout)
    assert told["temperatures"] == [0.0, 0.8]
    assert {each["rule"] for each in told["acceptance"]} == {"coupled", "rejection"}
    assert [each["way"] for each in told["predicted"]] == ["plain", "no draft", "local draft", "remote draft"]
    assert all(each["tokens_per_second"] > 0 for each in told["predicted"])
    assert told["step_seconds"]["target"]["1"] > 0
    assert told["usable"] == (1 <= told["pass_time_spread"] <= 1.5)
    assert 0 < told["hop_seconds"] < 0.1
    assert told["network_seconds"] == pytest.approx(0.0002)
    assert "tokens_per_second" not in told["acceptance"][0]  # this measurement's steps are artificially long
    assert all(each["draft_pods"] >= 1 for each in told["pools"].values())


@pytest.mark.verify
def test_it_tells_people_in_lines(directories: Directories, tmp_path: Path) -> None:
    shown = evaluate_pair(directories, tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "Predicted tokens a second of one verifier" in shown.stdout
    assert (
        "2 streams a verifier: " in shown.stdout or "the predictions are not usable" in shown.stdout
    )  # a busy machine


@pytest.mark.parametrize(
    ("lines", "options", "why"),
    [
        ([{"text": "a"}], ("--streams", "0"), "Invalid value for '--streams'"),
        ([{"txt": "a"}], (), "prompts.jsonl:1: must be an object with one of"),
        *(
            pytest.param(*case, marks=pytest.mark.verify)  # each starts a process that imports torch
            for case in (
                ([], (), "prompts.jsonl: has no prompts"),
                ([{"text": "a", "temperature": -1}], (), "prompts.jsonl:1: sampling.temperature"),
                ([{"text": "a"}], ("--device", "cuda"), "cuda"),
                ([{"text": "a", "rule": "contrastive"}], (), "prompts.jsonl:1: rule: is contrastive"),
                ([{"text": "a", "max_tokens": 200}], ("--kv-tokens", "1024"), "prompts.jsonl:1: may have 2"),
            )
        ),
    ],
)
def test_what_is_wrong_is_told(
    directories: Directories, tmp_path: Path, lines: list[object], options: tuple[str, ...], why: str
) -> None:
    file = prompts(tmp_path, *lines)
    done = evaluate(str(directories.target), str(directories.near), "--prompts", file, *options)
    assert done.returncode == ExitStatus.USAGE
    assert why in done.stderr
    assert "Traceback" not in done.stderr


def test_sampling_options_are_checked_before_models_are_loaded(directories: Directories, tmp_path: Path) -> None:
    target = tmp_path / "target"
    shutil.copytree(directories.target, target)
    (target / "model.safetensors").unlink()
    file = prompts(tmp_path, {"text": "a", "temperature": -1})
    done = evaluate(str(target), str(tmp_path / "missing"), "--prompts", file)
    assert done.returncode == ExitStatus.USAGE
    assert "prompts.jsonl:1: sampling.temperature" in done.stderr


def test_another_tokenizer_is_told(directories: Directories, tmp_path: Path) -> None:
    done = evaluate(str(directories.target), str(directories.foreign), "--prompts", prompts(tmp_path, {"text": "a"}))
    assert done.returncode == ExitStatus.USAGE
    assert "foreign differ" in done.stderr
