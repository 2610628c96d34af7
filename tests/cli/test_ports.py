"""Default ports agree everywhere. If a port is in use, the error names the option, before any model is loaded."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from draft_service.__main__ import main as draft
from orchestrator.__main__ import main as orchestrator
from specdec import cli, ports
from specdec.cli.passed_on import passing_on
from specdec.cli.up import up
from specdec.local import DEMO
from specdec.roles import environment
from tests.cli.commands import command_of
from verifier_service.__main__ import main as verifier

ROOT = Path(__file__).parents[2]


def default(command: Any, option: str) -> Any:
    return next(each.default for each in command.params if option in each.opts)


def test_defaults_agree() -> None:
    commands: Any = vars(typer.main.get_command(cli.app))["commands"]
    for main, port in ((verifier, ports.VERIFIER), (draft, ports.DRAFT), (orchestrator, ports.ORCHESTRATOR)):
        assert default(command_of(main), "--port") == port
    assert default(command_of(passing_on(up)), "--port") == ports.ORCHESTRATOR
    assert default(commands["generate"], "--address") == f"127.0.0.1:{ports.ORCHESTRATOR}"


@pytest.mark.parametrize("file", ["README.md", "examples/README.md", "specdec/client/__init__.py"])
def test_what_users_read_asks_the_orchestrator(file: str) -> None:
    said = re.findall(r"(?:127\.0\.0\.1|localhost):(\d+)", (ROOT / file).read_text())
    assert str(ports.ORCHESTRATOR) in said
    assert set(said) <= {str(ports.ORCHESTRATOR), str(ports.OPENAI)}


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield holder.getsockname()[1]


TARGET = ("--model", str(DEMO / "target"))


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (("verifier", *TARGET), "--port"),
        (("orchestrator", *TARGET, "--verifier", "127.0.0.1:1", "--workers", "2"), "--port"),
        (("up", "--port", "0"), "--draft-port"),
        *(
            pytest.param(*case, marks=pytest.mark.verify)  # each starts a process
            for case in (
                (("draft", "--model", str(DEMO / "draft")), "--port"),
                (("orchestrator", *TARGET, "--verifier", "127.0.0.1:1"), "--port"),
                (("up", "--verifier-port", "0", "--draft-port", "0"), "--port"),
                (("up", "--port", "0"), "--verifier-port"),
            )
        ),
    ],
)
def test_a_taken_port_is_one_line(command: tuple[str, ...], option: str, taken: int) -> None:
    run = [sys.executable, "-m", "specdec.cli", *command, option, str(taken)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60, env=environment())
    program = "specdec" if command[0] == "up" else command[0]
    assert done.stderr == (
        f"{program}: {option} {taken}: another program listens on 127.0.0.1:{taken}: "
        "stop it, or give another port (0 takes a free one)\n"
    )
    assert (done.stdout, done.returncode != 0) == ("", True)


def test_one_port_for_two_services_is_refused_at_once(unused_tcp_port: int) -> None:
    """Even before the models are read."""
    port = str(unused_tcp_port)
    run = [sys.executable, "-m", "specdec.cli", "up", "--port", port, "--verifier-port", port, "--target", "/none"]
    done = subprocess.run([*run, "--draft", "none"], capture_output=True, text=True, timeout=60, env=environment())
    assert done.stderr == (
        f"specdec: --verifier-port {port} and --port {port}: two services cannot share a port, change one\n"
    )


def test_a_port_that_no_draft_takes_may_be_taken(taken: int) -> None:
    """Without a draft service, its port is not checked: the only error is about the target."""
    run = [sys.executable, "-m", "specdec.cli", "up", "--port", "0", "--draft-port", str(taken), "--target", "/none"]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60, env=environment())
    assert done.stderr == "specdec: /none: no such directory\n"


def test_a_file_of_models_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_ORCHESTRATOR_MODELS", str(tmp_path / "models.yaml"))
    done = CliRunner().invoke(cli.app, ["up", "--port", "0"])
    assert done.exit_code == 2
    assert "SPECDEC_ORCHESTRATOR_MODELS" in done.stderr


@pytest.mark.parametrize("words", [("a:1", "--address", "b:1"), ("--address", "b:1", "a:1")])
def test_two_addresses_are_refused(words: tuple[str, ...]) -> None:
    done = CliRunner().invoke(cli.app, ["stats", *words])
    assert done.exit_code == 2
    assert "two addresses are given: a:1, b:1" in done.stderr


def test_options_of_the_http_api_need_its_port() -> None:
    run = [sys.executable, "-m", "specdec.cli", "up", "--port", "0", "--openai-strict-fields"]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60, env=environment())
    assert done.returncode == 2
    assert "--openai-strict-fields: needs --openai-port" in done.stderr


def test_options_of_the_draft_need_one() -> None:
    run = [sys.executable, "-m", "specdec.cli", "up", "--port", "0", "--target", "/none", "--draft-max-nodes", "8"]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60, env=environment())
    assert done.returncode == 2
    assert "--draft-max-nodes: needs --draft or --draft-heads" in done.stderr
