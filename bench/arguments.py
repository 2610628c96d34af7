"""Command lines of benchmarks: their parser, options that are lists, and checks of numbers."""

from __future__ import annotations

import argparse
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


def at_least(parser: argparse.ArgumentParser, args: argparse.Namespace, least: int, *names: str) -> None:
    """Refuse these options if their number, or one of their numbers, is below `least`."""
    for name in names:
        value = getattr(args, name)
        for number in value if isinstance(value, list) else [value]:
            if number < least:
                parser.error(f"--{name.replace('_', '-')} is {number}, must be at least {least}")


def not_negative(parser: argparse.ArgumentParser, args: argparse.Namespace, *names: str) -> None:
    """Refuse these options if they are negative or NaN."""
    for name in names:
        if not getattr(args, name) >= 0:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name):g}, must not be negative")
