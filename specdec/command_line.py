"""Command lines: how a function becomes a command, and the options that several commands share.

Help and errors are plain text: in 80 columns rich's tables would cut long names of options.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import typer

from specdec.client.address import Address, parse_addresses

DAY = 86_400.0
"""Seconds."""


def duration(help: str, *, min: float = 0.0, max: float = DAY) -> Any:
    """Return an option for a duration, in seconds."""
    return number(help, min=min, max=max)


def number(help: str, *, min: float, max: float) -> Any:
    """Return an option for a number. A value that does not fit is refused with the option, the value and the limits;
    "nan" never fits."""

    def check(value: float | None) -> float | None:
        if value is not None and math.isnan(value):
            raise typer.BadParameter(f"{value} is not a number; should be from {min:g} to {max:g}")
        return value

    return typer.Option(min=min, max=max, help=help, callback=check)


def address(text: str) -> Address:
    """Parse the address that an option gives; a wrong one is refused by option and value, with what is accepted."""
    try:
        return Address.parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def addresses(text: str) -> str:
    """Return the addresses that an option gives, joined by commas, as they are; refuse them as `address` does."""
    try:
        parse_addresses(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return text


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

    By default the arguments are this process's, and usage lines call the command by the program that was started. The
    options of a `service` may stand in the environment and in a file as well (`settings.py`).
    """
    if service is not None:
        from specdec.settings import configurable  # brings YAML, which the client's commands need not have

        command = configurable(service, command)
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(command)
    app(arguments, prog_name=name)
