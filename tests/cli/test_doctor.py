"""`specdec doctor`: its report on this machine and on models, even with only the client's packages installed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from specdec import cli
from specdec.doctor.machine import Machine
from specdec.doctor.models import Found, ModelCheck
from specdec.doctor.report import DoctorOptions, DoctorReport, lines
from specdec.engine.preflight.device import cuda_devices
from specdec.extras import EXTRAS, install_command
from tests.draft_service.renumbered import renumbered
from tests.vllm.pod import PYTHON, needs_vllm

ROOT = Path(__file__).parents[2]
TARGET, DRAFT = ROOT / "demo" / "target", ROOT / "demo" / "draft"

CLIENT_ALONE = sorted(module for module, extra in EXTRAS.items() if extra != "cli" and not module.startswith("google"))
"""Modules missing from an installation of `specdec-serve[cli]`."""

WITHOUT = """
import importlib.metadata, runpy, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {modules!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
sys.argv = ["specdec.cli", "doctor", *{arguments!r}]
runpy.run_module("specdec.cli", run_name="__main__", alter_sys=True)
"""


def ran(program: list[str]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, *program], capture_output=True, text=True, timeout=150, cwd=ROOT)
    assert "Traceback" not in done.stderr
    return done


def doctor(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return ran(["-m", "specdec.cli", "doctor", *map(str, arguments)])


def doctor_here(*arguments: str | Path) -> Result:
    """Run the command in this process, which has imported torch already."""
    return CliRunner().invoke(cli.app, ["doctor", *map(str, arguments)])


def client_alone(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return ran(["-c", WITHOUT.format(modules=CLIENT_ALONE, arguments=[str(each) for each in arguments])])


def test_a_pair_that_can_be_served() -> None:
    done = doctor_here("--model", TARGET, "--draft", DRAFT)
    assert (done.exit_code, done.stderr) == (0, "")
    for name in ("packages", "extras", "machine", "ports", "cache folder", "models", "fast paths"):
        assert f"\n{name}" in done.stdout
    for role in ("target", "draft"):
        assert f"  {role} (llama)" in done.stdout
    assert done.stdout.count(": can be served") == 2
    assert "\n  one call a step          on\n" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("Ready: the target and the draft can be served here")


@pytest.mark.verify
def test_a_process_of_its_own_reports_a_pair_too() -> None:
    done = doctor("--model", TARGET, "--draft", DRAFT)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count(": can be served") == 2
    assert "\n  one call a step          on\n" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("Ready: the target and the draft can be served here")


def test_heads_are_checked_and_counted_with_their_target() -> None:
    done = doctor_here("--model", TARGET, "--heads", ROOT / "demo" / "heads", "--json")
    assert (done.exit_code, done.stderr) == (0, "")
    target, heads = json.loads(done.stdout)["models"]
    assert (target["role"], heads["role"], heads["architecture"]) == ("target", "heads", "medusa")
    assert (
        heads["memory"]
        == heads["memory_at_least"]
        == heads["memory_parts"]["weights"] + heads["memory_parts"]["working"]
    )
    assert doctor_here("--heads", ROOT / "demo" / "heads").exit_code == 2
    refused = doctor_here("--model", TARGET, "--heads", DRAFT)
    assert refused.exit_code == 1
    assert "has no heads: no tensors such as" in refused.stderr


def test_a_draft_with_another_tokenizer_is_told_as_such(tmp_path: Path) -> None:
    done = doctor_here("--model", TARGET, "--draft", renumbered(tmp_path / "draft", without=0.5))
    assert (done.exit_code, done.stderr) == (0, "")
    found = re.search(r"another tokenizer: (\d+) tokens in common with the target's", done.stdout)
    assert found is not None
    assert 1000 < int(found[1]) < 4000
    with_its_own = doctor_here("--model", TARGET, "--draft", DRAFT)
    assert "another tokenizer" not in with_its_own.stdout


def test_json_tells_the_same() -> None:
    done = doctor_here("--model", TARGET, "--json")
    assert (done.exit_code, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    assert told["packages"]["torch"]["fits"]
    assert told["machine"]["cores_given"] >= 1
    assert told["fast_paths"]["one call a step"] is None
    assert [model["role"] for model in told["models"]] == ["target"]
    assert told["problem"] == ""
    assert told["ready"]
    assert told["verdict"].startswith("Ready: the target can be served here")


def test_the_target_goes_by_the_name_that_up_gives_it_too(tmp_path: Path) -> None:
    done = doctor_here("--target", tmp_path)
    assert (done.exit_code, done.stderr) == (1, f"specdec: {tmp_path}: no config.json\n")


@pytest.mark.parametrize("json_output", [False, True])
def test_a_model_that_cannot_be_served_is_a_status_and_a_line(tmp_path: Path, json_output: bool) -> None:
    done = doctor_here("--model", tmp_path, *["--json"] * json_output)
    assert done.exit_code == 1
    assert done.stderr == f"specdec: {tmp_path}: no config.json\n"
    if json_output:
        told = json.loads(done.stdout)
        assert (told["problem"], told["ready"]) == (f"{tmp_path}: no config.json", False)
    else:
        verdict = f"Not ready: these models cannot be served here, because {tmp_path}: no config.json"
        assert done.stdout.splitlines()[-1] == verdict
        assert f"! cannot be served         {tmp_path}: no config.json\n" in done.stdout


def changed(folder: Path, **fields: Any) -> Path:
    """Return a copy of the demo's target in which config.json has other fields."""
    shutil.copytree(TARGET, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    return folder


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"num_hidden_layers": 7}, "9 tensors are missing, such as model.layers.6.input_layernorm.weight"),
        ({"intermediate_size": 999}, "has the shape [384, 1024], must have [384, 999] by config.json"),
        ({"num_attention_heads": 7}, "is not a multiple of the number of attention heads"),
        (
            {"rope_scaling": {"type": "weird", "factor": 2.0}},
            "transformers does not know 'weird', which config.json has as rope_scaling.type",
        ),
    ],
)
@pytest.mark.parametrize("option", ["--model", "--draft"])
def test_a_model_that_its_files_do_not_fit_cannot_be_served(
    tmp_path: Path, option: str, fields: dict[str, Any], problem: str
) -> None:
    done = doctor_here(option, changed(tmp_path, **fields))
    assert done.exit_code == 1
    assert problem in done.stderr
    assert problem in done.stdout.splitlines()[-1]


def test_the_verdict_says_if_tensors_are_checked_only_at_start() -> None:
    report = DoctorReport(DoctorOptions(TARGET))
    checked = report.models
    assert checked is not None
    assert "at start" not in report.verdict
    vars(report)["models"] = ModelCheck([checked.found[0]._replace(tensors_checked=False)], "")  # as without torch
    assert "if the files of the target have all tensors, which is checked at start" in report.verdict


@pytest.mark.skipif(not isinstance(cuda_devices(), str), reason="there is a CUDA driver")
def test_no_model_can_be_served_on_a_device_that_is_not_there() -> None:
    done = doctor_here("--device", "cuda")
    assert done.exit_code == 1
    why = "no model can be served there, because --device is cuda, and there is no CUDA driver here"
    assert done.stdout.splitlines()[-1].startswith(f"Not ready: {why}")


@pytest.mark.parametrize(
    ("device", "cuda", "torch", "problem"),
    [
        ("cuda:7", 1, "CUDA 13.0", "--device is cuda:7, and the number of CUDA devices is 1"),
        ("cuda", 0, "CUDA 13.0", "--device is cuda, and the number of CUDA devices is 0"),
        ("cuda", 1, "CPUs", "--device is cuda, and torch is a CPU build"),
        ("gpu", 1, "CUDA 13.0", "device gpu: cpu, cuda and cuda:N are supported"),
        ("cuda:0", 1, "CUDA 13.0", ""),
    ],
)
def test_a_device_is_checked_without_a_target(device: str, cuda: int, torch: str, problem: str) -> None:
    for draft in (None, DRAFT):
        report = DoctorReport(DoctorOptions(draft=draft, device=device))
        vars(report)["machine"] = Machine.here()._replace(cuda=cuda, torch=torch)
        assert report.problem.startswith(problem)
        assert bool(report.problem) == bool(problem)


def test_a_device_that_is_not_there_is_told() -> None:
    problem = DoctorReport(DoctorOptions(TARGET, device="cuda:77")).problem
    assert problem.startswith("device cuda:77: ")


def test_an_engine_that_is_not_there_is_told() -> None:
    assert DoctorReport(DoctorOptions(TARGET, engine="vllm")).problem.startswith(
        "vLLM is not installed: pip install 'vllm"
    )
    assert doctor_here("--model", TARGET, "--engine", "vlm").exit_code == 2


def test_memory_that_vllm_decides_is_told_as_such() -> None:
    report = DoctorReport(DoctorOptions(TARGET, engine="vllm", device="cuda"))
    found = Found("target", TARGET, "llama", 512, "bfloat16", "cuda", None, None, None)
    vars(report)["models"] = ModelCheck([found], "")  # as on a machine with a GPU
    assert any("512 tokens of context, memory decided by vLLM: can be served" in line for line in lines(report))
    assert found.as_json()["memory_parts"] is None


@pytest.mark.verify
@needs_vllm
def test_where_vllm_is_it_is_told() -> None:
    program = [str(PYTHON), "-m", "specdec.cli", "doctor", "--model", str(TARGET), "--engine", "vllm", "--json"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=150, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    assert told["packages"]["vllm"]["fits"]
    assert [model["role"] for model in told["models"]] == ["target"]


def test_without_a_model_nothing_heavy_is_loaded() -> None:
    """Loading these modules would delay the verdict."""
    code = "import sys; sys.argv[1:] = ['doctor']; from specdec.cli import app; app(standalone_mode=False); "
    done = ran(["-c", code + "print(*sys.modules)"])
    *_, verdict, modules = done.stdout.splitlines()
    assert verdict.startswith("Ready: `specdec up` can start here")
    assert not {"torch", "transformers", "numba", "onnxruntime"} & set(modules.split())


def test_the_client_alone_is_enough() -> None:
    done = client_alone()
    assert (done.returncode, done.stderr) == (0, "")
    assert "\n  torch                    not installed\n" in done.stdout
    assert "\n  none                     not used: no installed service has one\n" in done.stdout
    assert f"\n  unknown                  torch is not installed: {install_command('verifier')}\n" in done.stdout


def test_the_client_alone_says_what_a_model_takes() -> None:
    done = client_alone("--model", TARGET)
    assert done.returncode == 1
    assert done.stderr == f"specdec: torch is not installed: {install_command('verifier')}\n"


# --- what is printed --------------------------------------------------------------------------------


def shown(**parts: Any) -> list[str]:
    """Return the lines of a report on this machine, with some parts replaced."""
    report = DoctorReport(DoctorOptions())
    vars(report).update({"fast_paths": {}, "packages": [], "extras": [], **parts})  # set as by `cached_property`
    return list(lines(report))


def test_what_needs_a_look_is_marked() -> None:
    from packaging.specifiers import SpecifierSet

    from specdec.doctor.packages import Extra, Package
    from specdec.engine.fast_paths import FastPathOff

    found = shown(
        packages=[Package("torch", "2.14.0", SpecifierSet(">=2.13,<2.14")), Package("rich", None, SpecifierSet())],
        extras=[Extra("cuda", ["triton"]), Extra("draft-gpu", ["a", "b"])],
        ports={"draft": "another program listens"},
        fast_paths={"a": FastPathOff("a", "why", "cost"), "b": None},
    )
    for line in (
        "! torch                    2.14.0           outside the tested range >=2.13,<2.14",
        "  rich                     not installed    wants ",
        f"  cuda                     missing triton: {install_command('cuda')}",
        f"  draft-gpu                missing a, b, instead of draft: {install_command('draft-gpu')}",
        "! 50052 (draft)            taken: another program listens",
        "! a                        off, why; cost",
        "  b                        on",
    ):
        assert line in found


@pytest.mark.parametrize(
    ("extras", "ports", "verdict"),
    [
        ({}, {}, "Ready: `specdec up` can start here"),
        (
            {},
            {"draft": "taken", "verifier": ""},
            "Ready: `specdec up` can start here, on other ports than 50052 (draft), which is taken",
        ),
        (
            {"verifier": ["torch", "numba"], "otel": ["x"]},
            {},
            "Not ready: only part of specdec can run here, because numba, torch not installed: "
            + install_command("all"),
        ),
        ({"draft": ["onnxruntime"]}, {}, "Not ready: only part of specdec can run here, because onnxruntime not "
         "installed: " + install_command("all")),
        ({"draft": ["onnxruntime"], "draft-gpu": []}, {}, "Ready: `specdec up` can start here"),
    ],
)  # fmt: skip
def test_the_verdict(extras: dict[str, list[str]], ports: dict[str, str], verdict: str) -> None:
    from packaging.specifiers import SpecifierSet

    from specdec.doctor.packages import Extra, Package

    found = [Extra(name, missing) for name, missing in extras.items()]
    packages = [Package("rich", None, SpecifierSet())]
    machine = DoctorReport(DoctorOptions()).machine._replace(cuda="no driver")
    assert shown(extras=found, ports=ports, packages=packages, machine=machine)[-1] == verdict
