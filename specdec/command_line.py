"""Command lines: running a function as a command, and options shared by several commands.

Help and errors are plain text: rich's tables would truncate long option names at 80 columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import typer

from specdec.signatures import PlainCommand
from specdec.wire.address import Address, parse_addresses

HELP_OPTIONS = {"help_option_names": ["--help", "-h"]}
"""Context settings that add `-h` to a command and its subcommands."""

DAY = 86_400.0
"""Seconds in a day, the default maximum of a duration."""


def duration(help: str, *, min: float = 0.0, max: float = DAY) -> Any:
    """Return an option for a duration in seconds."""
    return number(help, min=min, max=max)


def number(help: str, *, min: float, max: float) -> Any:
    """Return an option for a number. A value out of range is refused; the error names the option, the value and the
    limits. "nan" is always out of range."""

    def check(value: float | None) -> float | None:
        if value is not None and math.isnan(value):
            raise typer.BadParameter(f"{value} is not a number; should be from {min:g} to {max:g}")
        return value

    return typer.Option(min=min, max=max, help=help, callback=check)


def address(text: str) -> Address:
    """Parse an address option; typer.BadParameter, with the accepted forms, if it is invalid."""
    try:
        return Address.parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def addresses(text: str) -> str:
    """Return comma-separated addresses unchanged after validation; typer.BadParameter as in `address`."""
    try:
        parse_addresses(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return text


def optional_addresses(text: str | None) -> str | None:
    """Return comma-separated addresses, or None, unchanged; errors as in `addresses`."""
    return None if text is None else addresses(text)


Host = Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 listens on all interfaces.")]
LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"], typer.Option(help="Lowest level of log messages to write.")
]


def run_command(
    command: Callable[..., None],
    name: str | None = None,
    arguments: Sequence[str] | None = None,
    *,
    service: str | None = None,
) -> None:
    """Run a function as a command, with its docstring and options as the help, and end the process.

    By default the arguments are this process's, and usage lines show the name of the running program. The options of a
    `service` can also be set in the environment and in a file (`settings.py`).
    """
    if service is not None:
        from specdec.settings import configurable  # imports YAML, absent in client-only installations

        command = configurable(service, command)
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(cls=PlainCommand, context_settings=HELP_OPTIONS)(command)
    app(arguments, prog_name=name)
