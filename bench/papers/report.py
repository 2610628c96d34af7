"""The report of an evaluation as Markdown: for each cell speed, acceptance and diversity of all methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bench import markdown
from bench.papers.evaluation import Cell
from bench.papers.measures import ORDERS
from bench.papers.methods import PLAIN
from bench.report import Report

PLACES = 8
"""Number of candidate positions in a table of acceptance."""


def table(report: Report) -> str:
    lines = [
        f"Target: {report['target']}. Draft: {report['draft']}. {report['dtype']}; at most {report['tokens']} tokens a "
        f"turn, {report['rounds']} rounds.",
        f"Prompts: {', '.join(f'{count} {category}' for category, count in report['questions'].items())}.",
    ]
    for cell in report["cells"]:
        lines += ["", f"## {Cell(cell['temperature'], cell['streams'])}", "", *_cell(cell)]
    lines += ["", *_facts(report)]
    return "\n".join(lines) + "\n"


def _cell(cell: Report) -> list[str]:
    methods = cell["methods"]
    lines = ["Speed:", "", *_rows(methods, SPEED)]
    if len(_categories(cell)) > 1:
        lines += ["", "Speed-up by category:", "", *_by_category(cell)]
    lines += ["", "Parts of all steps by number of accepted candidates:", "", *_lengths(methods)]
    lines += ["", "Conditional acceptance by position:", "", *_positions(methods)]
    lines += ["", "Diversity of words, means over questions (entropy in bits):", "", *_rows(methods, DIVERSITY)]
    for rule, chain in chains(cell).items():
        told = ", ".join(f"{drafted}: {summary['milliseconds_a_token'][1]:.2f}" for drafted, summary in chain.items())
        lines += ["", f"Run time by tokens drafted, {rule}, ms a token: {told}."]
    if told := ", ".join(f"{category} {ratio:.2f}" for category, ratio in cell["auto_over_best"].items()):
        lines += ["", f"auto over the fixed method that turned out best, tokens a second: {told}."]
    return lines


def chains(cell: Report) -> dict[str, dict[int, Report]]:
    """Return the summaries of chains measured at several lengths, by the first part of their name and by length."""
    found: dict[str, dict[int, Report]] = {}
    for name, summary in cell["methods"].items():
        if summary["drafted"] is not None and summary["milliseconds_a_token"]:
            found.setdefault(name.partition(":")[0], {})[summary["drafted"]] = summary
    return {rule: dict(sorted(chain.items())) for rule, chain in found.items() if len(chain) > 1}


def _number(name: str, digits: int = 2) -> Callable[[Report], str]:
    return lambda summary: "-" if summary[name] is None else f"{summary[name]:.{digits}f}"


def _speed_up(summary: Report) -> str:
    deviation = summary["speed_up_deviation"]
    return _number("speed_up")(summary) + ("" if deviation is None else f" ± {deviation:.2f}")


def _equal(summary: Report) -> str:
    return f"{summary['equal']} of {summary['compared']}" if summary["compared"] else "-"


SPEED: Mapping[str, Callable[[Report], str]] = {
    "tokens/s": _number("tokens_a_second", 1),
    "speed-up": _speed_up,
    "median by question": _number("speed_up_median"),
    "tokens a step (MAT)": _number("tokens_a_step"),
    "rows a step": _number("rows_a_step", 1),
    "steps/s of a stream": _number("steps_a_second", 1),
    "tokens equal to plain's": _equal,
}


def _diversity(name: str) -> Callable[[Report], str]:
    return lambda summary: f"{summary['diversity'][name]:.3f}"


DIVERSITY: Mapping[str, Callable[[Report], str]] = {
    f"{name} {n}": _diversity(f"{name} {n}") for name in ("entropy", "distinct") for n in ORDERS
}


def _rows(methods: Mapping[str, Report], columns: Mapping[str, Callable[[Report], str]]) -> list[str]:
    rows = ([name, *(told(summary) for told in columns.values())] for name, summary in methods.items())
    return markdown.table(["method", *columns], rows)


def _categories(cell: Report) -> list[str]:
    return list(dict.fromkeys(name for summary in cell["methods"].values() for name in summary["categories"]))


def _by_category(cell: Report) -> list[str]:
    def told(summary: Report, category: str) -> str:
        here: dict[str, Any] | None = summary["categories"].get(category)
        return "-" if here is None or here["speed_up"] is None else f"{here['speed_up']:.2f}"

    categories = _categories(cell)
    rows = ([name, *(told(summary, each) for each in categories)] for name, summary in cell["methods"].items())
    return markdown.table(["method", *categories], rows)


def _lengths(methods: Mapping[str, Report]) -> list[str]:
    def told(summary: Report) -> list[str]:
        steps, total = summary["accepted"], sum(summary["accepted"])
        parts = [*steps[: PLACES + 1], *[0] * (PLACES + 1 - len(steps)), sum(steps[PLACES + 1 :])]
        return [f"{part / total:.3f}" if total else "-" for part in parts]

    rows = ([name, *told(summary)] for name, summary in methods.items())
    return markdown.table(["method", *range(PLACES + 1), "more"], rows)


def _positions(methods: Mapping[str, Report]) -> list[str]:
    def told(summary: Report) -> list[str]:
        rates = summary["conditional_acceptance"][:PLACES]
        return [f"{rate:.3f}" for rate in rates] + ["-"] * (PLACES - len(rates))

    rows = ([name, *told(summary)] for name, summary in methods.items() if name != PLAIN)
    return markdown.table(["method", *range(1, PLACES + 1)], rows)


def _facts(report: Report) -> list[str]:
    where = report["machine"]
    lines = [
        "Speed-up: tokens a second of a question, mean over questions, over plain decoding's; mean and standard "
        "deviation over rounds. Plain decoding ran on the same deployment, in turns with the others.",
        f"Measured on {where['cores']} cores of {where['processor']}.",
    ]
    if not report["exact"]:
        lines.append("The numerics of the deployment are not exact: tokens may differ for that reason alone.")
    lines += [f"Left out: {name}: {reason}" for name, reason in report["failed"].items()]
    if report["skipped"]:
        name, reason = next(iter(report["skipped"].items()))
        lines.append(f"Questions left out: {len(report['skipped'])}, such as {name}: {reason}")
    return [word for line in lines for word in (line, "")][:-1]
