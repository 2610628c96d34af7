"""Commands that run services: `specdec draft`, `specdec verifier`, `specdec orchestrator` one of them in this process,
`specdec up` all three, `specdec warm-up` none: it does what a verifier keeps for later starts. Their options are read
where they are used, so that other commands need none of it."""

from __future__ import annotations

import typer

from specdec.command_line import run_command
from specdec.extras import check_installed
from specdec.roles import load


def _serve(package: str, context: typer.Context) -> None:
    _run(f"{package}.__main__", context)


def _run(module: str, context: typer.Context) -> None:
    run_command(load(module).main, context.command_path, context.args)


def draft(context: typer.Context) -> None:
    """Serve a draft model (draft service)."""
    _serve("draft_service", context)


def verifier(context: typer.Context) -> None:
    """Serve a target model (verifier)."""
    _serve("verifier_service", context)


def orchestrator(context: typer.Context) -> None:
    """Serve completions to applications (orchestrator)."""
    _serve("orchestrator", context)


def warm_up(context: typer.Context) -> None:
    """Fill the cache folder for a target model and end (for image builds)."""
    _run("verifier_service.warm_up", context)


def up(context: typer.Context) -> None:
    """Start all three services on this machine, and again those that die."""
    check_installed("numpy", "structlog", "grpc_reflection", "grpc_status")  # or one service would name its own extra
    from specdec.cli.passed_on import passing_on
    from specdec.cli.up import up

    run_command(passing_on(up), context.command_path, context.args)
