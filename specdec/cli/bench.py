"""`specdec bench`: the benchmarks of a checkout."""

from __future__ import annotations

import typer

from specdec.cli.failure import fail
from specdec.roles import FOLDER, load


def bench(context: typer.Context) -> None:
    """Run a benchmark, or list them all. Needs a checkout."""
    if not (FOLDER / "bench").is_dir():
        fail("benchmarks come with the source: in a checkout, run `python -m bench`")
    load("bench.__main__").main(context.args)
