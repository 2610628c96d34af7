"""If a server, or the command itself, refuses a value, the error names the command's option for it."""

from __future__ import annotations

from typing import Any

import pytest

from specdec.cli.refusals import by_option, named_by_option
from specdec.client import InvalidRequest

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
