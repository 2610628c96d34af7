"""Commands as typer reads them: their class, and signatures of those whose options are not all their own parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import typer
from typer.core import TyperCommand

Command = Callable[..., None]

OF_CHECKER = "Value error, "
"""Prefix of some error messages of the library by which typer checks values."""


class PlainCommand(TyperCommand):
    """A command whose errors about option values lack that prefix."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            error.message = error.message.removeprefix(OF_CHECKER)
            raise


def parameters_of(function: Callable[..., object]) -> dict[str, inspect.Parameter]:
    """Return a function's parameters by name, with evaluated annotations, keyword-only."""
    found = inspect.signature(function, eval_str=True).parameters
    return {name: parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for name, parameter in found.items()}


def with_parameters(run: Command, parameters: Iterable[inspect.Parameter], command: Command) -> Command:
    """Return `run`, a function of `**options`, as a command with these parameters, and with the name and the help of
    `command`."""
    signature = inspect.Signature([*parameters])
    annotations = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    vars(run).update(__signature__=signature)
    run.__annotations__, run.__name__, run.__doc__ = annotations, command.__name__, command.__doc__
    return run
