"""Options of other servers: `specdec up` names its own in their place, as the guide for newcomers from vLLM does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from specdec.cli.other_servers import INSTEAD, other_option
from specdec.cli.passed_on import passing_on
from specdec.cli.up import up
from tests.cli.commands import command_of

OWN = {name for option in command_of(passing_on(up)).params for name in option.opts + option.secondary_opts}
GUIDE = (Path(__file__).parents[2] / "docs" / "serving-your-models.md").read_text(encoding="utf-8")


def flags(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text))


def test_no_option_that_exists_is_called_missing() -> None:
    assert not OWN & INSTEAD.keys()


@pytest.mark.parametrize("option", INSTEAD)
def test_what_replaces_it_exists(option: str) -> None:
    assert flags(INSTEAD[option]) <= OWN


def test_they_are_those_of_the_guide() -> None:
    rows = GUIDE.partition("## Coming from vLLM")[2].partition("\n## ")[0].splitlines()
    named = set().union(*(flags(row.split("|")[1]) for row in rows if row.startswith("|")))
    assert len(named) > 20
    assert named - OWN <= INSTEAD.keys()


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--target", "models/large", "--kv-tokens", "4096"], None),
        (["models/large", "--max-model-len", "4096"], "--max-model-len"),
        (["models/large", "--api-key=secret"], "--api-key"),
        (["models/large", "--speculative_config", "{}"], "--speculative_config"),
    ],
)
def test_the_first_one_is_found(words: list[str], found: str | None) -> None:
    assert other_option(words) == found
