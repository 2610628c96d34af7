"""Combine several reports of `specdec bench speed` in one table: the best of ours over the best of all peers.

    python -m bench.standings build/speed build/speed-60m

Each report is a row, each temperature and number of streams that any of them has is a column.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from bench.speed_report import Report, columns, grid, standing


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


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="where reports are: `--out` of `specdec bench speed`")
    args = parser.parse_args(given)
    if missing := [folder for folder in args.folders if not (folder / "speed.json").is_file()]:
        parser.error(f"{missing[0]} has no speed.json")
    print("\n".join(standings(json.loads((folder / "speed.json").read_text()) for folder in args.folders)))


if __name__ == "__main__":
    main()
