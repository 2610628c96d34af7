"""If a server, or the command itself, refuses a value, the error names the command's option for it."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from specdec.cli.refusals import by_option, named_by_option
from specdec.client import InvalidRequest
from specdec.exit_status import ExitStatus

OPTIONS: dict[str, Any] = dict.fromkeys(("temperature", "lookahead", "jacobi", "expansion", "stop", "speculation"))


@pytest.mark.parametrize(
    ("given", "field", "told"),
    [
        ({}, "sampling.temperature", "--temperature"),
        ({"lookahead": (1, 2, 3)}, "speculation.lookahead.window", "--lookahead"),
        ({"jacobi": 500}, "speculation.lookahead", "--jacobi"),
        ({}, "speculation.expansion[1]", "--expansion[1]"),
        ({}, "stop[0]", "--stop[0]"),
        ({}, "speculation.drafters", "--speculation"),
        ({}, "text", "text"),
    ],
)
def test_a_field_is_told_as_the_option_that_sets_it(given: dict[str, Any], field: str, told: str) -> None:
    refusal = InvalidRequest(
        f"{field}: is wrong; model: is too; and 2 more", violations=[(field, "is wrong"), ("model", "is too")]
    )
    assert str(by_option(refusal, OPTIONS | given)) == f"{told}: is wrong; model: is too; and 2 more"


def test_a_refusal_without_fields_is_told_as_it_is() -> None:
    assert str(by_option(InvalidRequest("no"), OPTIONS)) == "no"


@pytest.mark.parametrize(
    ("problem", "told"),
    [
        ("jacobi = -1: must be a whole number", "--jacobi: is -1, must be a whole number"),
        ("stop = [5]: must be a list", "--stop: is [5], must be a list"),
        ('prompt = "x": is not valid UTF-8', 'prompt = "x": is not valid UTF-8'),
        ("give either lookahead or jacobi", "give either lookahead or jacobi"),
    ],
)
def test_a_value_that_fits_no_message_is_told_by_its_option(problem: str, told: str) -> None:
    assert named_by_option(problem, OPTIONS) == told


@pytest.mark.parametrize("words", [("generate", "-"), ("tokenize", "-"), ("chat",)])
def test_stdin_that_is_no_text_is_named(words: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "specdec.cli", *words, "--address", "127.0.0.1:1"]
    strict = os.environ | {"PYTHONIOENCODING": "utf-8:strict"}
    done = subprocess.run(command, input=b"\xff\n", capture_output=True, env=strict, check=False, timeout=60)
    why = b"'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"
    assert (done.returncode, done.stdout, done.stderr) == (ExitStatus.USAGE, b"", b"specdec: stdin: %s\n" % why)
