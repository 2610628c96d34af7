"""Access to a function's typer command and its options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer


def command_of(main: Callable[..., None]) -> Any:
    """Return the command that typer makes of a function."""
    app = typer.Typer(add_completion=False)
    app.command()(main)
    return typer.main.get_command(app)
