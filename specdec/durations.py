"""Durations as options of commands: each has a least and a greatest value, and none is "nan"."""

from __future__ import annotations

import math
from typing import Any

import typer

DAY = 86_400.0
"""Seconds."""


def duration(help: str | None = None, *, min: float = 0.0, max: float = DAY) -> Any:
    """A typer option for a duration; its unit is in its name. What does not fit names option, value and limits."""

    def check(value: float | None) -> float | None:
        if value is not None and math.isnan(value):
            raise typer.BadParameter(f"{value} is no number; should be one from {min:g} to {max:g}")
        return value

    return typer.Option(min=min, max=max, help=help, callback=check)
