"""Commands that run services. `specdec draft`, `specdec verifier`, `specdec orchestrator` and `specdec openai` each run
one service in this process; `specdec up` and `specdec serve` run all three on this machine. `specdec warm-up` and
`specdec evaluate` only use the services' code. Options are defined next to that code, which other commands do not
import."""

from __future__ import annotations

import typer

from specdec.cli.failure import fail
from specdec.cli.other_servers import INSTEAD, other_option
from specdec.command_line import run_command
from specdec.exit_status import ExitStatus
from specdec.extras import check_installed
from specdec.roles import load


def _serve(package: str, context: typer.Context, service: str) -> None:
    run_command(load(f"{package}.__main__").main, context.command_path, context.args, service=service)


def draft(context: typer.Context) -> None:
    """Serve a draft model (draft service)."""
    _serve("draft_service", context, "draft")


def verifier(context: typer.Context) -> None:
    """Serve a target model (verifier)."""
    _serve("verifier_service", context, "verifier")


def orchestrator(context: typer.Context) -> None:
    """Serve completions to applications (orchestrator)."""
    _serve("orchestrator", context, "orchestrator")


def openai(context: typer.Context) -> None:
    """Serve OpenAI's HTTP API in front of orchestrators."""
    _serve("specdec.openai_api", context, "openai")


def warm_up(context: typer.Context) -> None:
    """Fill the cache folder for a target model and exit (for image builds)."""
    run_command(load("verifier_service.warm_up").main, context.command_path, context.args)


def evaluate(context: typer.Context) -> None:
    """Measure a pair of target and draft, and predict its serving speed."""
    run_command(load("evaluation.__main__").main, context.command_path, context.args)


def up(context: typer.Context) -> None:
    """Start all three services on this machine, and restart them if they die."""
    _serve_all(context)


def serve(context: typer.Context) -> None:
    """Start all three services for MODEL: the same as `up --target MODEL`."""
    _serve_all(context, model="target")


def _serve_all(context: typer.Context, model: str = "") -> None:
    check_installed(
        "numpy", "structlog", "yaml", "grpc_reflection", "grpc_status"
    )  # otherwise the error would name the extra of one service
    if (option := other_option(context.args)) is not None:
        fail(f"{option}: there is no such option; {INSTEAD[option.replace('_', '-')]}", ExitStatus.USAGE)
    from specdec.cli.passed_on import passing_on, unprefixed
    from specdec.cli.up import up

    if (problem := unprefixed(context.args, up)) is not None:
        fail(problem, ExitStatus.USAGE)
    run_command(passing_on(up, model=model), context.command_path, context.args)
