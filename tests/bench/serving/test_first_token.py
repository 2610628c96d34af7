"""Start times of commands, which take turns, each starting first with an empty cache; and the report on them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.report import CUT_OFF
from bench.serving.commands import Ask, Command, llama_server, specdec_up
from bench.serving.first_token import EVERY, FIRST, NEXT, PROMPT_TOKENS, measure, parsed, table
from bench.systems.llama_cpp import LlamaFiles
from bench.systems.system import NotServingError
from tests.bench.systems.stand_in_llama_server import program
from tests.services.conftest import Directories

pytestmark = pytest.mark.timeout(900)  # several processes start, slowly on a busy machine

MACHINE = {"cores": 2, "processor": "Processor", "instructions": ["avx2"]}


class Kept:
    """A command that writes a cache file, and records its requests and whether each start found the file."""

    def __init__(self, name: str, *, keeps: bool = True, fails: type[BaseException] | None = None) -> None:
        self.command = Command(name, self._start, keeps)
        self.found: list[bool] = []
        self.asked: list[list[int]] = []
        self._fails = fails

    @contextlib.contextmanager
    def _start(self, cache: Path) -> Iterator[Ask]:
        self.found.append((cache / "kept").exists())
        if self._fails is not None and len(self.found) == 2:
            raise self._fails("no more")
        (cache / "kept").touch()
        yield self.asked.append


def run(*commands: Kept, rounds: int) -> dict[str, Any]:
    return measure([each.command for each in commands], rounds, patience=0.0)


def turns(report: dict[str, Any]) -> list[tuple[str, str, int]]:
    return [(each["command"], each["kind"], each["round"]) for each in report["starts"]]


def test_commands_take_turns_and_each_first_start_finds_nothing() -> None:
    one, two = Kept("one"), Kept("two", keeps=False)
    report = run(one, two, rounds=2)
    assert turns(report) == [
        ("one", FIRST, 1),
        ("one", NEXT, 1),
        ("two", EVERY, 1),
        ("two", EVERY, 2),
        ("one", FIRST, 2),
        ("one", NEXT, 2),
    ]
    assert (one.found, two.found) == ([False, True, False, True], [False, False])
    assert {len(prompt) for prompt in one.asked + two.asked} == {PROMPT_TOKENS}
    assert len({tuple(prompt) for prompt in one.asked + two.asked}) == 1
    assert all(0 <= each["ready"] <= each["token"] for each in report["starts"])
    assert CUT_OFF not in report


def test_a_command_that_fails_is_left_out_from_then_on() -> None:
    broken, fine = Kept("broken", fails=NotServingError), Kept("fine", keeps=False)
    report = run(broken, fine, rounds=2)
    assert turns(report) == [("broken", FIRST, 1), ("fine", EVERY, 1), ("fine", EVERY, 2)]
    assert report["failed"] == {"broken": "no more"}


def test_what_was_measured_until_ctrl_c_is_kept() -> None:
    report = run(Kept("one", fails=KeyboardInterrupt), rounds=2)
    assert turns(report) == [("one", FIRST, 1)]
    assert report[CUT_OFF]


def test_the_report_has_medians_and_says_what_failed() -> None:
    def start(command: str, kind: str, token: float) -> dict[str, Any]:
        return {"command": command, "kind": kind, "ready": token - 0.5, "token": token, "foreign_cores": 0.1}

    starts = [start("one", FIRST, token) for token in (9.0, 5.0, 7.0)]
    starts += [start("one", NEXT, 3.0), start("two", EVERY, 1.0)]
    report = {"model": "m", "draft": None, "rounds": 3, "machine": MACHINE, "starts": starts, "failed": {"x": "why"}}
    page = table(report)
    assert "| `one` | 6.5 (4.5, 8.5) | 7.0 (5.0, 9.0) | 2.5 (2.5, 2.5) | 3.0 (3.0, 3.0) |" in page
    assert "| `two` | 0.5 (0.5, 0.5) | 1.0 (1.0, 1.0) | 0.5 (0.5, 0.5) | 1.0 (1.0, 1.0) |" in page
    assert "Target: m. Draft: none." in page
    assert "Others took 0.1 cores at most before a start." in page
    assert "Not measured: x: why" in page


@pytest.mark.parametrize(
    ("word", "fails"), [("slow", None), ("chatty", "^not one token: "), ("broken", "^llama-server ")]
)
def test_llama_server_is_asked_for_one_token(word: str, fails: str | None, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_text(word)
    (command,) = llama_server(LlamaFiles(program(tmp_path), tmp_path / "model.gguf", None))
    expected = contextlib.nullcontext() if fails is None else pytest.raises(NotServingError, match=fails)
    with expected, command.start(tmp_path) as ask:
        ask([1, 2, 3])


@pytest.mark.verify
def test_specdec_up_is_asked_for_one_token(directories: Directories) -> None:
    (command,) = specdec_up(directories.target, None)
    with command.start(Path(os.environ["SPECDEC_CACHE_DIR"])) as ask:
        ask([1, 2, 3])


def test_specdec_up_that_does_not_come_up_is_one_line(tmp_path: Path) -> None:
    (command,) = specdec_up(tmp_path, None)
    with pytest.raises(NotServingError, match=r"^specdec up ended: .*config\.json"), command.start(tmp_path):
        pass


@pytest.mark.parametrize(
    ("given", "what"),
    [
        (["--rounds", "0"], "--rounds is 0, must be at least 1"),
        (["--patience", "-1"], "--patience is -1, must be at least 0"),
        (["--vllm-python", "/nowhere"], "--vllm-python: /nowhere is not a file"),
        (["--target", "/nowhere"], "--target: "),
    ],
)
def test_what_cannot_be_measured_is_refused(given: list[str], what: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(given)
    assert what in capsys.readouterr().err


def test_every_command_that_can_be_measured_is(tmp_path: Path) -> None:
    binary = str(program(tmp_path))
    gguf = tmp_path / "model.gguf"
    gguf.touch()
    commands, _ = parsed(["--vllm-python", binary, "--llama-server", binary, "--llama-gguf", str(gguf)])
    assert [command.name for command in commands] == [
        "specdec up",
        "specdec up --draft none",
        "vllm serve",
        "vllm serve --enforce-eager",
        "llama-server",
    ]
