"""Combine several reports of `python -m bench speed` in one table: the best of ours over the best of all peers.

    python -m bench leaderboard build/speed build/speed-60m

Each report is a row, each temperature and number of streams that any of them has is a column.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from bench.arguments import parser_of
from bench.speed.report import Report, columns, grid, standing


def standings(reports: Iterable[Report]) -> list[str]:
    """Return the table as Markdown lines."""
    reports = list(reports)
    places = {(t, streams) for report in reports for t in report["temperatures"] for _, streams in columns(report)}
    heads = [f"T = {t:g}, {streams} stream{'s' * (streams > 1)}" for t, streams in sorted(places)]
    rows = (
        (f"{report['model'].split()[0]}, {report['dtype']}", [standing(report, *place) for place in sorted(places)])
        for report in reports
    )
    return grid("", heads, rows)


def main(given: Sequence[str]) -> None:
    parser = parser_of("leaderboard", __doc__)
    parser.add_argument("folders", nargs="+", type=Path, help="where reports are: `--out` of `python -m bench speed`")
    args = parser.parse_args(given)
    if missing := [folder for folder in args.folders if not (folder / "speed.json").is_file()]:
        parser.error(f"{missing[0]} has no speed.json")
    print("\n".join(standings(json.loads((folder / "speed.json").read_text()) for folder in args.folders)))
