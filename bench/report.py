"""Publishes a report: the measurements as JSON, a Markdown table, and for some a plot."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

Report = dict[str, Any]

CUT_OFF = "cut_off"
"""Key of a report: True if Ctrl-C ended the measurement early; the report has the results so far."""


def publish(
    report: Report,
    out: Path | None,
    name: str,
    table: Callable[[Report], str],
    plot: Callable[[Report, Path], None] | None = None,
) -> None:
    """Print the table, and write `name`.json, .md and, with a plot, .png into the folder `out`. If the measurement was
    interrupted, mark the report and exit with status 130."""
    cut_off = report.get(CUT_OFF, False)
    text = ("CUT OFF: results so far.\n\n" if cut_off else "") + table(report)
    print(text, end="")
    if out is not None:
        (out / f"{name}.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        (out / f"{name}.md").write_text(text, encoding="utf-8")
        if plot is not None:
            try:
                plot(report, out / f"{name}.png")
            except ModuleNotFoundError as error:  # the extra `bench` is missing: keep the measurements without a plot
                print(f"no plot: {error}", file=sys.stderr)
    if cut_off:
        sys.exit(130)


def folder(name: str) -> Path:
    """Return an option's report folder; create it and check that it is writable before anything is measured."""
    out = Path(name)
    try:
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{name} cannot be written: {error.strerror}") from error
    return out
