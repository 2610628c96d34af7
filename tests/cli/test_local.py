"""The command line's contract with scripts, and its error messages, with real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import typer
from typer.testing import CliRunner

from draft_service.__main__ import main as draft
from orchestrator.__main__ import main as orchestrator
from specdec import cli
from specdec.cli.up import _memory, lines
from specdec.client import Client
from specdec.engine.memory import free_bytes
from specdec.engine.model_directory import ModelDirectory
from specdec.engine.model_file import ModelDirectoryError
from specdec.engine.onnx.engine import OnnxEngine
from specdec.engine.onnx.export import export
from specdec.engine.placement import Placement
from specdec.engine.preflight.memory_needed import in_gigabytes, memory_needed
from specdec.exit_status import ExitStatus, how_it_ended
from specdec.local import PROGRAMS, LocalError, Stack
from testing.processes import alive, children_of
from tests.cli.running_up import Up, running_up
from tests.models import VOCABULARY, make, near
from verifier_service.__main__ import main as verifier

pytestmark = pytest.mark.timeout(900)  # several processes start, slowly on a busy machine

NAME, ALIAS = "any/name at all", "gpt-4o"
"""Names of `up`'s target in requests."""

TOKENS = 200
"""Tokens of a text during which a service dies."""

RETRIES = 200
"""Client retries, enough for a restart of the only orchestrator on a busy machine."""

STARTING = """
import sys, time
from pathlib import Path
from specdec.local import PROGRAMS, Stack

pretending = dict.fromkeys(PROGRAMS, ("tests.cli.pretends",))
with Stack.start(Path(sys.argv[1]), sys.argv[2], programs=pretending):
    print("ready", flush=True)
    time.sleep(600)
"""
"""A program that starts services which only pretend to serve."""


@dataclass(frozen=True)
class Pair:
    target: Path
    draft: Path


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    root = tmp_path_factory.mktemp("pair")
    target = make("llama", root / "target")
    return Pair(target, near(target, root / "draft", noise=0.04))


def specdec(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "specdec.cli", *arguments], capture_output=True, text=True, timeout=100, **options
    )


@pytest.fixture(scope="module")
def up(pair: Pair) -> Iterator[Up]:
    names = ("--served-model-name", NAME, "--served-model-name", ALIAS)
    with running_up("--target", str(pair.target), "--draft", str(pair.draft), "--openai-port", "0", *names) as running:
        yield running
    assert running.process.returncode == 0


def test_all_services_run(up: Up) -> None:
    assert len(up.children) == 4


def test_any_openai_client_is_answered(up: Up) -> None:
    address = up.described["services"]["openai"]
    with openai.OpenAI(base_url=f"http://{address}/v1", api_key="none") as client:
        assert [model.id for model in client.models.list()] == [NAME, ALIAS]
        answer = client.completions.create(
            model=NAME, prompt="hello there", max_tokens=8, extra_body={"ignore_eos": True}
        )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8


def test_up_tells_what_each_service_runs(up: Up, pair: Pair) -> None:
    pods = up.described["pods"]
    assert {role: pod["address"] for role, pod in pods.items()} == up.described["services"]
    assert [pods[role]["model"] for role in ("verifier", "draft")] == [pair.target.name, pair.draft.name]
    assert (pods["verifier"]["device"], pods["verifier"]["dtype"]) == ("cpu", "float32")
    assert all(pod["process_id"] in up.children and pod["memory_bytes"] > 10_000_000 for pod in pods.values())
    most = memory_needed(ModelDirectory(pair.target), Placement(), free_bytes("cpu")).total  # as in the memory table
    assert pods["verifier"]["memory_bytes"] < 1.1 * most
    *services, ask, openai_too, why, _ = lines(up.described)
    assert [line.split()[:2] for line in services] == [[role, pod["address"]] for role, pod in pods.items()]
    assert f"{pair.target.name} on cpu in float32" in services[list(pods).index("verifier")]
    assert ask.endswith(f"--address {up.address}")
    address = up.described["services"]["openai"]
    assert openai_too.endswith(f"http://{address}/v1 OPENAI_API_KEY=none (model {NAME})")
    assert why.endswith(f"stats {up.address}")


def test_generate_reports_json(up: Up, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    prompts = [{"text": "hello there"}, {"tokens": [40, 50, 60]}]
    file.write_text("\n".join(json.dumps(p) for p in prompts) + "\n\n")
    common = ["generate", "--prompt-file", str(file), "--address", up.address, "--json", "--max-tokens", "24"]
    common += ["--temperature", "0.7", "--top-p", "0.95", "--top-k", "50", "--seed", "7"]
    drafted = specdec(*common, "--speculation", "auto")
    plain = specdec(*common, "--speculation", "off")
    assert (drafted.returncode, drafted.stderr) == (0, "")
    reports = [json.loads(line) for line in drafted.stdout.splitlines()]
    assert len(reports) == 2
    for report, other in zip(reports, map(json.loads, plain.stdout.splitlines()), strict=True):
        assert set(report) == {
            *(
                "line",
                "tokens",
                "text",
                "finish_reason",
                "usage",
                "seed",
                "request_id",
                "speculation",
                "seconds",
                "time_to_first_token",
            )
        }
        assert set(report["speculation"]) == {
            *("steps", "offered", "accepted", "mean_tokens_per_step", "sources"),
            *("undrafted_reason", "undrafted_tokens", "decisions"),
        }
        assert report["tokens"] == other["tokens"]
        assert report["seed"] == 7
        assert report["usage"]["completion_tokens"] == len(report["tokens"])
        assert report["finish_reason"] in ("stop", "length")
        assert 0 < report["time_to_first_token"] <= report["seconds"]
        assert other["speculation"]["offered"] == 0


def test_the_draft_is_used(up: Up) -> None:
    """On a slow machine candidates may be late or not pay; CONTRASTIVE yields no token without the draft."""
    command = ("generate", "hello there", "--address", up.address, "--json", "--max-tokens", "20")
    run = specdec(*command, "--rule", "contrastive")
    assert run.returncode == 0, run.stderr
    assert not json.loads(run.stdout)["speculation"].get("undrafted_reason")


def test_generate_streams_text(up: Up) -> None:
    done = specdec("generate", "abc", "--address", up.address, "--max-tokens", "10", "--seed", "1")
    assert done.returncode == 0
    assert "10 tokens" in done.stderr
    assert "\x1b" not in done.stdout  # no colours without a terminal
    piped = specdec("generate", "-", "--address", up.address, "--max-tokens", "10", "--seed", "1", input="abc")
    assert piped.stdout == done.stdout


@pytest.mark.parametrize(
    ("arguments", "message", "status"),
    [
        (("abc", "--temperature", "nan"), "temperature", ExitStatus.REFUSED),
        (("abc", "--prompt-file", "x"), "PROMPT or --prompt-file", ExitStatus.USAGE),
    ],
)
def test_generate_says_what_is_wrong_in_one_line(
    up: Up, arguments: tuple[str, ...], message: str, status: ExitStatus
) -> None:
    """Other errors, and unreachable addresses, are in the table of `tests/mistakes`."""
    done = specdec("generate", *arguments, "--address", up.address)
    assert done.returncode == status
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("role", "module"),
    [
        pytest.param("draft", "draft_service", marks=pytest.mark.verify),
        ("verifier", "verifier_service"),
        ("orchestrator", "orchestrator"),
    ],
)
def test_a_client_sees_only_a_pause(up: Up, role: str, module: str) -> None:
    """A dead service is restarted at its old address, and the user sees a line."""
    with Client(up.address, max_retries=RETRIES) as client:

        def text(*, killing: bool) -> list[int]:
            tokens: list[int] = []
            options = {"max_tokens": TOKENS, "temperature": 0.8, "seed": 3, "ignore_end_token": True}
            with client.generate("hello there", **options) as stream:  # type: ignore[arg-type]
                for chunk in stream:
                    tokens += chunk.tokens
                    if killing:
                        os.kill(up.pid_of(module), signal.SIGKILL)
                        killing = False
            return tokens

        whole = text(killing=False)
        assert len(whole) == TOKENS
        assert text(killing=True) == whole
        assert up.until_said(f"{role} died ({how_it_ended(-signal.SIGKILL)}): it starts again in 0.25 s")
        assert up.until_said(f"{role} is back at ")
        assert text(killing=False) == whole


@pytest.mark.parametrize(("option", "value"), [("--dtype", "int3"), ("--port", "99999")])
def test_wrong_flags_are_refused(option: str, value: str) -> None:
    done = CliRunner().invoke(cli.app, ["up", option, value])
    assert done.exit_code == ExitStatus.USAGE
    assert option in done.stderr


def test_a_start_that_fails_is_one_line(pair: Pair, tmp_path: Path) -> None:
    """Other causes, and used ports, are in the table of `tests/mistakes`."""
    broken = make("llama", tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"not weights")
    for arguments, message in (
        (("--target", str(pair.target), "--draft", "/nonexistent"), "no such directory"),
        (("--target", str(broken), "--draft", "none"), "cannot be loaded"),
    ):
        done = specdec("up", *arguments)
        assert done.returncode == 1, arguments
        assert message in done.stderr
        assert "Traceback" not in done.stderr
        assert done.stdout == ""


def test_a_process_that_has_ended_has_no_memory() -> None:
    """Whether or not its parent has read its exit status."""
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert _memory(process.pid) == 0
    process.wait()
    assert _memory(process.pid) == 0


def test_a_start_that_is_killed_is_told_with_the_memory_that_it_needs(pair: Pair) -> None:
    """A killed process leaves no message: the launcher reports the signal and the memory estimate."""
    programs = PROGRAMS | {"verifier": ("tests.cli.killed",)}
    with pytest.raises(LocalError) as told, Stack.start(pair.target, "none", programs=programs):
        pass
    needed = memory_needed(ModelDirectory(pair.target), Placement())
    how = "verifier did not start: killed by SIGKILL, as the system does when memory is short"
    assert str(told.value).startswith(f"{how}; {needed}, together {in_gigabytes(needed.total)} at least")
    assert str(told.value).endswith("free")


def test_how_a_process_ended_is_told() -> None:
    assert how_it_ended(1) == "exit status 1"
    assert how_it_ended(ExitStatus.SHORT_OF_MEMORY) == "exit status 71: memory was short"
    assert how_it_ended(-signal.SIGTERM) == "killed by SIGTERM"
    assert how_it_ended(-63) == "killed by signal 63"


def test_children_end_with_a_killed_parent(pair: Pair) -> None:
    command = [sys.executable, "-c", STARTING, str(pair.target), str(pair.draft)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        children = children_of(process.pid)
        assert len(children) == 3
        process.send_signal(signal.SIGKILL)
    until_ended(children)


@pytest.mark.verify
def test_services_end_with_a_killed_command(pair: Pair) -> None:
    command = [sys.executable, "-m", "specdec.cli", "up", "--port", "0", "--target", str(pair.target)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert ":" in process.stdout.readline()
        children = children_of(process.pid)
        assert len(children) == 2
        process.send_signal(signal.SIGKILL)
    until_ended(children)


def until_ended(pids: list[int]) -> None:
    deadline = time.monotonic() + 20
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in pids if alive(pid)]


def test_a_model_is_not_replaced_by_its_export(pair: Pair) -> None:
    with pytest.raises(ModelDirectoryError, match="not replaced"):  # only an existing export may be replaced
        export(ModelDirectory(pair.draft), pair.draft)
    assert (pair.draft / "model.safetensors").is_file()


@pytest.mark.verify
def test_export_writes_what_the_draft_serves(pair: Pair, tmp_path: Path) -> None:
    model, target = pair.draft, tmp_path / "exported"
    done = specdec("export", str(model), str(target))
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{target}\n"
    assert done.stderr == f"specdec: exporting {model} to {target} in float32; large models take minutes\n"
    files = {f.name for f in target.iterdir()}
    assert files >= {"model.onnx", "specdec.json", "config.json", "tokenizer.json"}
    assert OnnxEngine(ModelDirectory(target), capacity=512, threads=1).vocabulary == VOCABULARY
    wrong = specdec("export", "/nonexistent", str(tmp_path / "other"))
    assert wrong.returncode == ExitStatus.USAGE
    assert wrong.stderr == "specdec: /nonexistent: no such directory\n"


@pytest.mark.verify
def test_an_export_that_is_told_to_end_leaves_nothing(tmp_path: Path) -> None:
    model, beside = make("llama", tmp_path / "shallow", num_hidden_layers=1), tmp_path / "exports"
    command = [sys.executable, "-m", "specdec.cli", "export", str(model), str(beside / "out")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while not list(beside.glob("out.partial-*")) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    assert process.returncode == ExitStatus.TERMINATED, said
    assert said.startswith("specdec: exporting ")
    assert len(said.splitlines()) == 1
    assert list(beside.iterdir()) == []


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (("orchestrator", "--model", "m", "--verifier", "h:1"), "--patience-ms"),
        (("orchestrator", "--model", "m", "--verifier", "h:1"), "--silence-seconds"),
        (("orchestrator", "--model", "m", "--verifier", "h:1"), "--failover-seconds"),
        (("orchestrator", "--model", "m", "--verifier", "h:1"), "--drain-seconds"),
        (("verifier", "--model", "m"), "--drain-seconds"),
        (("draft", "--model", "m"), "--drain-seconds"),
        (("stats", "h:1"), "--watch"),
        (("generate", "x"), "--timeout"),
    ],
)
@pytest.mark.parametrize("value", ["inf", "nan", "4294968000", "-1"])
def test_a_duration_has_limits(command: tuple[str, ...], option: str, value: str) -> None:
    """The error names option, value and limits, and nothing starts."""
    app: Any = {"orchestrator": orchestrator, "verifier": verifier, "draft": draft}.get(command[0])
    if app is None:
        done = CliRunner().invoke(cli.app, [*command, option, value])
    else:
        services = typer.Typer()
        services.command()(app)
        done = CliRunner().invoke(services, [*command[1:], option, value])
    assert done.exit_code == 2
    said = " ".join(done.output.replace("│", " ").split())
    assert f"Invalid value for '{option}'" in said
    assert "should be" in said
