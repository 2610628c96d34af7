"""Help output: usage lines name the command as typed, and every option has a help text."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from draft_service.__main__ import main as draft
from orchestrator.__main__ import main as orchestrator
from specdec import cli
from specdec.openai_api.__main__ import main as openai
from specdec.roles import environment
from tests.cli.commands import command_of
from verifier_service.__main__ import main as verifier

SERVICES = {"draft": command_of(draft), "verifier": command_of(verifier), "orchestrator": command_of(orchestrator)}
SERVICES |= {"openai": command_of(openai)}
COMMANDS: dict[str, Any] = {**vars(typer.main.get_command(cli.app))["commands"], **SERVICES}
PROGRAMS = [("specdec.cli", service, f"specdec {service}") for service in SERVICES]
PROGRAMS += [(f"{service}_service", "", f"python -m {service}_service") for service in ("draft", "verifier")]
PROGRAMS += [("orchestrator", "", "python -m orchestrator"), ("specdec.openai_api", "", "python -m specdec.openai_api")]
"""(module, its first argument, the program name in usage lines)"""

SHOWN = ("specdec verifier", "python -m orchestrator")
"""Programs run by every test run: a subcommand and a module. `make verify` runs them all."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("folder")


@functools.cache  # shared by tests
def run(module: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, *filter(None, arguments)]
    narrow = {**environment(), "COLUMNS": "80"}
    return subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=folder, env=narrow)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_and_its_options_have_their_help(name: str) -> None:
    command = COMMANDS[name]
    assert command.help
    assert not [each.name for each in command.params if not each.help and not getattr(each, "hidden", False)]


@pytest.mark.parametrize(
    ("module", "service", "name"),
    [pytest.param(*each, marks=[] if each[2] in SHOWN else pytest.mark.verify) for each in PROGRAMS],
)
def test_a_usage_line_names_what_was_typed(module: str, service: str, name: str, folder: Path) -> None:
    shown = run(module, service, "--help", folder=folder)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.startswith(f"Usage: {name} [OPTIONS]\n")
    refused = run(module, service, "--modle", "m", folder=folder)
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"Usage: {name} [OPTIONS]\nTry '{name} --help' for help.\n")


@pytest.mark.parametrize(
    "service", [pytest.param(each, marks=[] if each == "verifier" else pytest.mark.verify) for each in SERVICES]
)
def test_no_name_of_an_option_is_cut_off_in_a_narrow_terminal(service: str, folder: Path) -> None:
    shown = run("specdec.cli", service, "--help", folder=folder).stdout
    names = [name for each in SERVICES[service].params if not each.hidden for name in each.opts + each.secondary_opts]
    assert "--threads-while-drafting" in names or service != "verifier"
    assert not [name for name in names if name not in shown]
