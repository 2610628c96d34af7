"""What `bench.throughput` publishes: a table and a plot. A widened model is called so in each."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from bench.widen import LABEL

BASE = "specdec plain"
DISTURBED = 0.2  # cores taken by processes of others: from here on a measurement counts as disturbed


def model_label(directory: Path) -> str:
    """Its name, and whether it is a widened one."""
    label = json.loads((directory / "config.json").read_text(encoding="utf-8")).get(LABEL)
    name = directory.resolve().name
    if label is None:
        return name
    sizes = f"from {label['source_parameters'] / 1e6:.0f}M to {label['parameters'] / 1e6:.0f}M parameters"
    return f"{name} ({label['source']} WIDENED {sizes}: says what its source says, costs what its size costs)"


def rates(report: dict[str, Any], subject: str, streams: int) -> dict[int, float]:
    """Tokens a second by round."""
    return {
        each["round"]: each["tokens_per_second"]
        for each in report["measurements"]
        if (each["subject"], each["streams"]) == (subject, streams)
    }


def table(report: dict[str, Any]) -> str:
    """Markdown: tokens a second, then ratios within a round, then what could not be measured."""
    sizes = sorted({each["streams"] for each in report["measurements"]})
    names = list(dict.fromkeys(each["subject"] for each in report["measurements"]))
    where = report["machine"]
    lines = [
        f"Target: {report['model']}. Draft: {report['draft'] or 'none'}.",
        f"{report['dtype']}, T = {report['temperature']:g}, prompts of {report['prompt_tokens']} tokens continued by "
        f"{report['tokens']}; {where['cores']} cores of {where['processor']}.",
        f"Tokens a second of all streams together: median of {report['rounds']} interleaved rounds (least to most).",
        "",
    ]

    def rows(cell: Any) -> None:
        lines.append("| streams | " + " | ".join(map(str, sizes)) + " |")
        lines.append("|---" * (len(sizes) + 1) + "|")
        lines.extend(f"| {name} | " + " | ".join(cell(name, size) for size in sizes) + " |" for name in names)

    def rate(name: str, size: int) -> str:
        values = rates(report, name, size).values()
        return f"{statistics.median(values):.0f} ({min(values):.0f} to {max(values):.0f})" if values else "-"

    def ratio(name: str, size: int) -> str:
        base = rates(report, BASE, size)
        values = [value / base[number] for number, value in rates(report, name, size).items() if number in base]
        return f"{statistics.median(values):.2f}" if values else "-"

    rows(rate)
    lines += ["", f"The same over {BASE}: median of the ratio within a round.", ""]
    rows(ratio)
    disturbed = sum(each["foreign_cores"] > DISTURBED for each in report["measurements"])
    lines += ["", f"Disturbed by processes of others (more than {DISTURBED:g} cores): {disturbed} of "]
    lines[-1] += f"{len(report['measurements'])} measurements."
    lines += [f"\nNot measured: {name}: {reason}" for name, reason in report["failed"].items()]
    return "\n".join(lines) + "\n"


def plot(report: dict[str, Any], file: Path) -> None:
    """Tokens a second over streams, both logarithmic, with bars from the least to the most."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    figure, axes = pyplot.subplots(figsize=(8, 5.5), layout="constrained")
    sizes = sorted({each["streams"] for each in report["measurements"]})
    for name in dict.fromkeys(each["subject"] for each in report["measurements"]):
        values = [(size, list(found.values())) for size in sizes if (found := rates(report, name, size))]
        middle = [statistics.median(each) for _, each in values]
        below = [m - min(each) for m, (_, each) in zip(middle, values, strict=True)]
        above = [max(each) - m for m, (_, each) in zip(middle, values, strict=True)]
        axes.errorbar(
            [size for size, _ in values],
            middle,
            yerr=[below, above],
            label=name,
            marker="o",
            capsize=3,
            linestyle="-" if name.startswith("specdec") else "--",
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(ticker.LogFormatter())  # 200, not 2 x 10^2
    axes.yaxis.set_minor_formatter(ticker.LogFormatter(minor_thresholds=(2, 0.5)))
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_xlabel("streams at once")
    axes.set_ylabel("tokens a second, all streams together")
    where = report["machine"]
    facts = f"{report['dtype']}, T = {report['temperature']:g}, {where['cores']} cores of {where['processor']}"
    axes.set_title(f"{report['model']}\n{facts}", fontsize=8)
    axes.grid(visible=True, which="both", alpha=0.2)
    axes.legend()
    figure.savefig(file, dpi=150)
    pyplot.close(figure)
