"""Every failure of a command has its exit status, and no traceback."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from asyncio.subprocess import PIPE
from collections.abc import Callable

import grpc
import pytest
import typer

from specdec.cli.failure import STATUS, ending, program, status_of
from specdec.cli.up import lines
from specdec.client.errors import ERRORS, REASONS, InvalidRequest, Overloaded, SpecdecError, Unavailable
from specdec.exit_status import ExitStatus
from tests.client.fake_server import Act, FakeServer


def raising(error: BaseException) -> Callable[[], None]:
    def command() -> None:
        raise error

    return ending(command)


def test_every_error_of_a_call_has_a_status() -> None:
    assert set(ERRORS.values()) | set(REASONS.values()) == set(STATUS) == set(SpecdecError.__subclasses__())
    assert status_of(grpc.StatusCode.OUT_OF_RANGE) is ExitStatus.REFUSED


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (InvalidRequest("top_p: is 2"), 65, "specdec: top_p: is 2\n"),
        (Unavailable("nobody"), 69, "specdec: nobody\n"),
        (Overloaded("full"), 75, "specdec: full\n"),
        (Overloaded("used up", retry_after=20.4), 75, "specdec: used up; try again in 21 s\n"),
        (KeyError("x"), 70, "specdec: internal error: KeyError: 'x' (SPECDEC_TRACEBACK=1 shows where)\n"),
        (KeyboardInterrupt(), 130, ""),
        (SystemExit(3), 3, ""),
    ],
)
def test_an_error_is_one_line_and_a_status(
    error: BaseException, status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        raising(error)()
    assert ended.value.code == status
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("started_by", "words"),
    [("/venv/bin/specdec", "specdec"), ("/venv/specdec/cli/__main__.py", "python -m specdec.cli")],
)
def test_hints_name_the_program_as_it_was_started(started_by: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [started_by, "up"])
    assert program() == words
    found = {"pods": {}, "address": "h:1", "services": {}}
    assert [line for line in lines(found) if words in line] == [
        f'Try it: {words} generate "def main(" --address h:1',
        f"Which drafters propose tokens, and why: {words} stats h:1",
    ]


def test_what_is_not_served_is_named() -> None:
    orchestrator = {"address": "h:1", "memory_bytes": 0, "models": ["m"]}
    found = {"pods": {"orchestrator": orchestrator}, "address": "h:1", "services": {}}
    bare, whole = list(lines(found, has_model=False)), list(lines({**found, "services": {"openai": "h:2"}}))
    assert [line.partition(":")[0] for line in bare if line.startswith("No ")] == ["No HTTP API", "No draft model"]
    assert not [line for line in whole if line.startswith("No ")]


def test_a_traceback_may_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_TRACEBACK", "1")
    with pytest.raises(KeyError):
        raising(KeyError("x"))()


def test_what_typer_says_stays() -> None:
    with pytest.raises(typer.BadParameter):
        raising(typer.BadParameter("no"))()


HANDSHAKE = """
import sys
from concurrent.futures import ThreadPoolExecutor
sys.argv = ["specdec", sys.argv[1]]
import specdec.cli
import grpc

server = grpc.server(ThreadPoolExecutor(1))
port = server.add_insecure_port("127.0.0.1:0")
server.start()
with grpc.secure_channel(f"127.0.0.1:{port}", grpc.ssl_channel_credentials()) as channel:
    print(channel.unary_unary("/a/b").future(b"").code().name)
"""
"""A program that imports a command, and then fails to connect with TLS to a port without it."""


@pytest.mark.parametrize(
    ("command", "given", "level"), [("serve", "", "ERROR"), ("stats", "", "NONE"), ("up", "INFO", "INFO")]
)
def test_grpcs_own_log_is_quiet_unless_it_is_wanted(command: str, given: str, level: str) -> None:
    env = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    env |= {"GRPC_VERBOSITY": given} if given else {}
    shown = subprocess.run(
        [sys.executable, "-c", f"{HANDSHAKE}\nimport os; print(os.environ['GRPC_VERBOSITY'])", command],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert shown.stdout.split() == ["UNAVAILABLE", level], shown.stderr
    assert ("Handshake failed" in shown.stderr) == bool(given)


async def test_an_interrupted_command_ends_without_a_word() -> None:
    async with FakeServer(Act(0, "hold")) as server:
        command = (sys.executable, "-m", "specdec.cli", "generate", "hi", "--address", server.address)
        process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)
        async with asyncio.timeout(60):
            await server.held.wait()
            process.send_signal(signal.SIGINT)
            _, complained = await process.communicate()
    assert process.returncode == ExitStatus.INTERRUPTED
    assert b"Traceback" not in complained
