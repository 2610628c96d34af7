"""Environment variables that nothing reads are reported; the list of those that are read is complete."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specdec.cli import app
from specdec.exit_status import ExitStatus
from specdec.variables import PREFIXES, READ, unread

ROOT = Path(__file__).parents[1]
CODE = ("specdec", "verifier_service", "draft_service", "orchestrator", "evaluation")
LITERAL = re.compile(r"""(["'])(SPECDEC_[A-Z_]*[A-Z])\1""")


def test_the_list_has_all_names_in_the_code() -> None:
    files = [file for folder in CODE for file in (ROOT / folder).rglob("*.py") if file.name != "variables.py"]
    named = {name for file in files for _, name in LITERAL.findall(file.read_text())}
    assert {name for name in named if not name.startswith(PREFIXES)} == {
        name for name in READ if not name.startswith(PREFIXES)
    }
    assert {name for name in named if name.startswith("SPECDEC_DRAFT_")} <= READ  # of vLLM's plugin


def test_what_nothing_reads_is_found() -> None:
    given = {
        "SPECDEC_LOG_LEVEL": "loud",
        "SPECDEC_DRAFTS_EXPANSION": "3",
        "SPECDEC_UP_PORT": "7",
        "SPECDEC_EMPTY": "",
        "SPECDEC_VERIFIER_KV_TOKEN": "7",  # the verifier reports it
        "SPECDEC_TLS": "1",
        "SPECDEC_DRAFTS": "h:1",
        "SPECDEC_PORT": "tcp://10.0.0.1:50050",
        "SPECDEC_MAIN_SERVICE_HOST": "10.0.0.1",
        "SPECDEC_MAIN_PORT_50050_TCP_ADDR": "10.0.0.1",
        "HOME": "/",
    }
    assert unread(given) == ["SPECDEC_DRAFTS_EXPANSION", "SPECDEC_LOG_LEVEL", "SPECDEC_UP_PORT"]


def test_a_command_reports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_UP_PORT", "7")
    done = CliRunner().invoke(app, ["api-key"])
    assert done.exit_code == 0
    assert done.stderr.startswith("specdec: SPECDEC_UP_PORT: not a variable that specdec reads; ")
    assert "UP_PORT" not in CliRunner().invoke(app, ["verifier", "--help"]).stderr  # its log has it


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        (("stats",), "127.0.0.1:1"),
        (("stats", "--address", "127.0.0.1:3"), "127.0.0.1:3"),
        (("stats", "127.0.0.1:3"), "127.0.0.1:3"),
        (("trace", "x"), "127.0.0.1:1"),
    ],
)
def test_a_command_for_one_server_asks_the_first_address(words: tuple[str, ...], asked: str) -> None:
    done = CliRunner().invoke(app, words, env={"SPECDEC_ADDRESS": "127.0.0.1:1,127.0.0.1:2"})
    assert done.exit_code == ExitStatus.UNREACHABLE
    assert f"specdec: {asked}: " in done.stderr


@pytest.mark.parametrize("words", [("generate", "x"), ("tokenize", "x"), ("stats",), ("trace", "x"), ("chat",)])
def test_commands_take_the_address_from_the_environment(words: tuple[str, ...]) -> None:
    done = CliRunner().invoke(app, words, env={"SPECDEC_ADDRESS": "nowhere"})
    assert done.exit_code == 2
    assert "'nowhere': the port is missing" in done.stderr
