"""Command lines of benchmarks: their parser, options that are lists, and checks of numbers."""

from __future__ import annotations

import argparse
import math
from typing import NoReturn


class _Parser(argparse.ArgumentParser):
    """A parser that refuses wrong options in one sentence."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (--help lists the options)\n")


def parser_of(name: str, about: str | None) -> argparse.ArgumentParser:
    """Return the parser of `python -m bench NAME`; the benchmark's docstring is its help."""
    return _Parser(
        prog=f"python -m bench {name}", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def names(text: str) -> list[str]:
    return text.split(",")


def whole_numbers(text: str) -> list[int]:
    """Return the whole numbers of "1,4,16", each once and in ascending order."""
    return sorted({int(number) for number in text.split(",")})


def numbers(text: str) -> list[float]:
    """Return the numbers of "0,0.3", each once and in ascending order."""
    return sorted({float(number) for number in text.split(",")})


def limit(
    parser: argparse.ArgumentParser, args: argparse.Namespace, least: float, *names: str, most: float = math.inf
) -> None:
    """Refuse these options if their number, or one of their numbers, is NaN, below `least` or above `most`; None is
    accepted."""
    limits = f"at least {least}" if most == math.inf else f"from {least} to {most}"
    for name in names:
        value = getattr(args, name)
        for number in value if isinstance(value, list) else [] if value is None else [value]:
            if not least <= number <= most:
                shown = f"{number:g}" if isinstance(number, float) else number
                parser.error(f"--{name.replace('_', '-')} is {shown}, must be {limits}")
