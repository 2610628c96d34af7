"""Combine several reports of the speed benchmark in one table: specdec's best rate over the best of all other systems.

    python -m bench leaderboard build/speed build/speed-60m

Each report is a row; each pair of temperature and number of streams in any report is a column.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from bench import markdown
from bench.arguments import parser_of
from bench.report import Report
from bench.speed.measurements import columns, configurations, found, ratios, streams_label
from bench.systems.specdec import NAME
from bench.systems.vllm_verifier import is_of_both


def lead(report: Report, temperature: float, streams: int, system: str = "") -> str:
    """Return a cell: the median ratio, within a round, of specdec's best configuration to the best of `system` (or of
    all others if it is ""), and the names of both; "-" if they were never measured together."""

    def best(ours: bool) -> tuple[str, list[Report]]:
        """Return the configuration with the best median rate over kinds, and its measurements; ("", []) if none."""
        names = [each for each in _alone(report) if each.startswith(NAME) is ours]
        candidates = {
            name: found(report, configuration=name, temperature=temperature, streams=streams)
            for name in names
            if ours or name.startswith(system)
        }
        measured = {name: each for name, each in candidates.items() if each}
        return max(
            measured.items(),
            key=lambda item: statistics.median(each["tokens_per_second"] for each in item[1]),
            default=("", []),
        )

    (mine, own), (name, theirs) = best(True), best(False)
    shared = ratios(own, theirs)
    return f"{statistics.median(shared):.2f} ({mine.removeprefix(NAME + ' ')} over {name})" if shared else "-"


def _alone(report: Report) -> list[str]:
    """Return the configurations that do not combine two systems."""
    return [name for name in configurations(report) if not is_of_both(name)]


def leads(report: Report, temperature: float) -> list[str]:
    """Return the table of one report, with a row for each other system, as Markdown lines."""
    systems = list(dict.fromkeys(name.split()[0] for name in _alone(report) if not name.startswith(NAME)))
    counts = list(dict.fromkeys(streams for _, streams in columns(report)))
    rows = ([system, *(lead(report, temperature, count, system) for count in counts)] for system in systems)
    return markdown.table(["", *map(streams_label, counts)], rows)


def leaderboard(reports: Iterable[Report]) -> list[str]:
    """Return the table of several reports as Markdown lines."""
    reports = list(reports)
    places = {(t, streams) for report in reports for t in report["temperatures"] for _, streams in columns(report)}
    heads = [f"T = {t:g}, {streams_label(streams)}" for t, streams in sorted(places)]
    rows = (
        [f"{report['model'].split()[0]}, {report['dtype']}", *(lead(report, *place) for place in sorted(places))]
        for report in reports
    )
    return markdown.table(["", *heads], rows)


def main(given: Sequence[str]) -> None:
    parser = parser_of("leaderboard", __doc__)
    parser.add_argument("folders", nargs="+", type=Path, help="folders of reports: `--out` of the speed benchmark")
    args = parser.parse_args(given)
    if missing := [folder for folder in args.folders if not (folder / "speed.json").is_file()]:
        parser.error(f"{missing[0]} has no speed.json")
    print("\n".join(leaderboard(json.loads((folder / "speed.json").read_text()) for folder in args.folders)))
