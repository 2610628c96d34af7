"""Wrong commands, configurations and files fail within seconds, with a line that names what to change."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from specdec.roles import environment
from tests.mistakes.__main__ import table
from tests.mistakes.commands import ASKED, MISTAKES, TAKEN, Mistake
from tests.mistakes.folder import furnish

pytestmark = pytest.mark.timeout(900)  # several processes start, slowly on a busy machine

PAGE = Path(__file__).parents[2] / "docs" / "when-something-is-wrong.md"

MAX_SECONDS = 3.0
"""Limit on a command's CPU time, in seconds. Wall time depends on the machine's load."""

SLOW = {"draft", "evaluate", "orchestrator", "tokenize", "up", "verifier"}
"""Commands that take a second or more: they import an engine, or wait for a server."""

SHOWN = {
    "specdec evaluate target foreign --prompts prompts.jsonl",
    "specdec verifier",
    "specdec verifier --model target-1",
    "specdec verifier --model cut-weights",
    "specdec verifier --model mamba",
    "specdec verifier --model target --device cuda:9",
    "specdec verifier --model target --kv-tokens 1000000000000",
    "specdec verifier --model target --draft-model foreign",
    "specdec verifier --model target --jacobi 500",
    "specdec verifier --config typo.yaml",
    "specdec verifier --model target --tls-key key.pem",
    "specdec draft --model draft --learn-tokens 9",
    "specdec draft --model draft --dtype bfloat16",
    "specdec orchestrator --models models.yaml",
    "specdec orchestrator --model target --verifier big",
    "specdec orchestrator --model bad-template --verifier big:1 --workers 2",
    "specdec up --target too-cold",
    "specdec up --target target --orchestrator-tenants none.yaml",
    "specdec up --target target --verifier-step-rows 3",
}
"""Mistakes in slow commands tried by every test run; `make verify` tries them all."""

BEFORE = "Usage: specdec|Try 'specdec|specdec: waiting for"
"""Pattern of lines that may precede the error."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    furnish(made := tmp_path_factory.mktemp("mistakes"))
    return made


@pytest.fixture(scope="module")
def taken() -> Iterator[str]:
    """Yield a port on which another program listens."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield str(holder.getsockname()[1])


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    """Yield the address of an orchestrator whose target runs without a draft."""
    command = [sys.executable, "-m", "specdec.cli", "up", "--target", "target", "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=folder, env=environment()) as process:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["address"]
        process.terminate()


def check(mistake: Mistake, words: list[str], folder: Path, taken: str) -> None:
    """Run a wrong command and compare its output with the table. A slow command is run once more, since other processes
    may have evicted the CPU's caches."""
    if seconds_of(mistake, words, folder, taken) > MAX_SECONDS:
        assert seconds_of(mistake, words, folder, taken) < MAX_SECONDS


def seconds_of(mistake: Mistake, words: list[str], folder: Path, taken: str) -> float:
    """Run a wrong command and compare its output; return its CPU seconds."""
    said, out = (folder / "said.txt"), (folder / "out.txt")
    with said.open("w") as stderr, out.open("w") as stdout:
        process = subprocess.Popen(
            [sys.executable, "-m", "specdec.cli", *(word.replace(TAKEN, taken) for word in words)],
            stdout=stdout,
            stderr=stderr,
            stdin=subprocess.DEVNULL,
            cwd=folder,
            env=environment(),
        )
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    lines = said.read_text().replace(taken, TAKEN).splitlines()
    assert "Traceback" not in said.read_text()
    assert lines, "nothing on stderr"
    assert mistake.says in lines[-1]
    assert process.returncode == mistake.status
    assert out.read_text() == ""
    more = [line for line in lines[:-1] if line and not re.match(BEFORE, line)]
    assert not more, "more than the usage and one line"
    return float(used.ru_utime + used.ru_stime)


def is_shown(mistake: Mistake) -> bool:
    return mistake.words[0] not in SLOW or mistake.command in SHOWN


@pytest.mark.parametrize(
    "mistake",
    [pytest.param(each, marks=[] if is_shown(each) else pytest.mark.verify) for each in MISTAKES],
    ids=lambda each: each.command,
)
def test_a_mistake_is_told(mistake: Mistake, folder: Path, taken: str) -> None:
    check(mistake, mistake.words, folder, taken)


def test_what_is_shown_is_in_the_table() -> None:
    assert {each.command for each in MISTAKES} >= SHOWN


@pytest.mark.verify
@pytest.mark.parametrize("mistake", ASKED, ids=lambda each: each.command)
def test_a_wrong_request_is_told(mistake: Mistake, folder: Path, taken: str, address: str) -> None:
    check(mistake, [*mistake.words, "--address", address], folder, taken)


def test_the_page_has_this_table() -> None:
    """`python -m tests.mistakes` prints it."""
    found = re.search(r"<!-- mistakes -->\n(.*)\n<!-- end -->", PAGE.read_text(), re.DOTALL)
    assert found is not None
    assert found[1].strip() == table()
