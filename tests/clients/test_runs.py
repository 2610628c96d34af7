"""Checks of clients: right answers pass, wrong ones fail, and a check that does not finish is a problem."""

from __future__ import annotations

import asyncio
import shutil
import sys
from pathlib import Path

import pytest

from tests.client.fake_server import TEXT, FakeServer
from tests.clients.checks.uses import Server
from tests.clients.environment import CHECKS
from tests.clients.runs import Result, Uses, run_check
from tests.clients.served import known
from tests.openai_api.front import front

SERVER = Server("http://127.0.0.1:1", "m", "k", "a completion", "an answer")
PYTHON = (sys.executable, "-m", "tests.clients.checks")


def run(folder: Path, *command: str, server: Server = SERVER, seconds: float = 60.0) -> Uses:
    return run_check(command, Path(sys.executable).parent, server, folder / "logs" / "log", seconds)


def test_a_wrong_answer_is_a_failure(tmp_path: Path) -> None:
    found = run(tmp_path, *PYTHON, "tests.clients.stand_in")
    assert found == Uses(
        ["right"],
        {
            "wrong": "WrongAnswerError: got 'something else', expected 'an answer'",
            "in one piece": "WrongAnswerError: the stream came in one piece: ['an answer']",
            "no city": 'WrongAnswerError: got \'{"city": "London", "warm": true}\', '
            "expected a city of ('Paris', 'Rome') and whether it is warm",
            "exits": "SystemExit: it has ended",
        },
        None,
    )
    assert "Traceback" in (tmp_path / "logs" / "log").read_text()


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node")
def test_a_wrong_answer_is_a_failure_in_node_too(tmp_path: Path) -> None:
    for file in (CHECKS / "main.mjs", CHECKS / "uses.mjs", CHECKS.parent / "stand_in.mjs"):
        shutil.copy(file, tmp_path)
    found = run(tmp_path, "node", str(tmp_path / "main.mjs"), "stand_in")
    assert found == Uses(
        ["right"],
        {
            "wrong": 'Error: got "something else", expected "an answer"',
            "in one piece": 'Error: got ["an answer"], expected several pieces',
            "no city": 'Error: got {"city":"London"}, expected a city',
        },
        None,
    )


def test_a_check_that_cannot_be_imported_is_a_failure(tmp_path: Path) -> None:
    found = run(tmp_path, *PYTHON, "tests.clients.nothing")
    assert found.fails == {"import": "ModuleNotFoundError: No module named 'tests.clients.nothing'"}


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("import time; time.sleep(600)", "its check did not end within 1 s"),
        ("raise SystemExit(3)", "its check ended with status 3"),
        ("", "its check recorded nothing"),
    ],
)
def test_a_check_that_does_not_end_well_is_a_problem(script: str, problem: str, tmp_path: Path) -> None:
    assert run(tmp_path, sys.executable, "-c", script, seconds=1.0) == Uses([], {}, problem)


async def test_the_check_of_openais_client(tmp_path: Path) -> None:
    """The server gives the same text in every answer: texts work, structured answers and calls fail."""
    async with FakeServer() as orchestrator, front(orchestrator.address) as http:
        server = await asyncio.to_thread(known, f"http://{http.address}", "key")
        assert (server.model, server.completion, server.answer) == ("fake", TEXT, TEXT)
        found = await asyncio.to_thread(
            lambda: run(tmp_path, *PYTHON, "tests.clients.checks.openai", server=server, seconds=120.0)
        )
    assert found.problem is None
    assert {"models", "completion", "chat", "chat, streamed", "responses", "responses, streamed"} <= set(found.works)
    assert {"tools", "JSON schema", "parse"} <= found.fails.keys()


def test_only_a_run_without_a_failure_passes(tmp_path: Path) -> None:
    about = ("name", "package", "1.0", "PyPI", "2026-11-29")
    assert Result(*about, ["chat"]).passed
    for worse in (
        Result(*about),
        Result(*about, ["chat"], {"tools": "no"}),
        Result(*about, ["chat"], problem="its check ended with status 3"),
    ):
        assert not worse.passed
        worse.save(tmp_path / "results")
        assert Result.load(tmp_path / "results" / "name.json") == worse
