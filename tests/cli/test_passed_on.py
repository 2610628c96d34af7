"""`specdec up` accepts every option of its services and passes each to its service."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from draft_service.__main__ import main as draft
from orchestrator.__main__ import main as orchestrator
from specdec.cli.passed_on import SET_BY_UP, Values, arguments, passing_on
from specdec.cli.up import up
from specdec.openai_api.__main__ import main as openai
from tests.cli.commands import command_of
from verifier_service.__main__ import main as verifier

SERVICES: dict[str, Any] = {"verifier": verifier, "draft": draft, "orchestrator": orchestrator, "openai": openai}


def run(*words: str) -> tuple[str, dict[str, Values]]:
    """Return a command's output for these words, and the options that it passes on."""
    seen: dict[str, Values] = {}

    def command(threads: int = 1, *, passed: Mapping[str, Values]) -> None:
        """Do nothing."""
        seen.update(passed)

    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(passing_on(command))
    return CliRunner().invoke(app, words).output, seen


@pytest.mark.parametrize("role", SERVICES)
def test_no_option_of_a_service_is_missing(role: str) -> None:
    taken = {name for each in command_of(passing_on(up)).params for name in each.opts + each.secondary_opts}
    for option in command_of(SERVICES[role]).params:
        if option.name not in SET_BY_UP and option.name != "help":
            for name in option.opts + option.secondary_opts:
                assert f"--{role}-{name.removeprefix('--')}" in taken


def test_only_what_was_given_is_passed_on() -> None:
    words = (
        "--threads",
        "2",
        "--speculation",
        "jacobi",
        "--verifier-lookahead",
        "5",
        "3",
        "5",
        "--verifier-step-rows",
        "64",
        "--verifier-no-exact",
        "--draft-kv-tokens",
        "1024",
    )
    of_http = ("--openai-allow-origin", "https://a.example", "--openai-no-serve-metrics")
    names = ("--served-model-name", "big", "--orchestrator-served-model-name", "gpt-4o")
    output, passed = run(*words, *of_http, *names, "--orchestrator-failover-seconds", "2.5")
    assert output == ""
    assert passed == {
        "verifier": {"step_rows": 64, "exact": False, "speculation": "jacobi", "lookahead": (5, 3, 5)},
        "draft": {"kv_tokens": 1024},
        "orchestrator": {"failover_seconds": 2.5, "served_model_name": ["big", "gpt-4o"]},
        "openai": {"allow_origin": ["https://a.example"], "serve_metrics": False},
    }


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (("--verifier-step-rows", "3"), "--verifier-step-rows"),
        (("--draft-engine", "abacus"), "--draft-engine"),
        (("--orchestrator-failover-seconds", "nan"), "--orchestrator-failover-seconds"),
        (("--verifier-model", "m"), "--verifier-model"),
        (("--openai-allow-origin", "a.example/"), "--openai-allow-origin"),
        (("--openai-orchestrator", "a:1"), "--openai-orchestrator"),
    ],
)
def test_a_wrong_one_is_refused_by_its_name(words: tuple[str, ...], option: str) -> None:
    output, passed = run(*words)
    assert option in output
    assert not passed


@pytest.mark.parametrize(
    ("main", "required", "values"),
    [
        (verifier, ("--model", "m"), {"exact": False, "compile": True, "step_rows": 64, "dtype": "bfloat16"}),
        (verifier, ("--model", "m"), {"speculation": "lookahead", "lookahead": (5, 3, 5)}),
        (openai, (), {"allow_origin": ["https://a.example", "null"], "serve_metrics": True, "strict_fields": True}),
        (
            orchestrator,
            ("--model", "m", "--verifier", "h:1"),
            {"served_model_name": ["a", "b"], "workers": 2, "host": "::1"},
        ),
    ],
)
def test_the_service_reads_the_values_that_were_given(main: Any, required: tuple[str, ...], values: Values) -> None:
    context = command_of(main).make_context("service", [*required, *arguments(values)])
    assert values.items() <= context.params.items()


def test_the_model_may_be_an_argument() -> None:
    """`specdec serve` takes the model as an argument, `specdec up` as --target."""
    command = command_of(passing_on(up, model="target"))
    context = command.make_context("serve", ["--openai-port", "0", "some/model", "--verifier-step-rows", "64"])
    assert (str(context.params["target"]), context.params["verifier_step_rows"]) == ("some/model", 64)
