"""Command lines of benchmarks: their parser, and options that are lists."""

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
