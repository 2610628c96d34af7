"""The report of the speed benchmark: tables and a plot, which mark a padded model as such."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench import markdown
from bench.conditions import model_name
from bench.report import Report
from bench.speed.leaderboard import leads
from bench.speed.measurements import Column, columns, configurations, found, ratios, streams_label
from bench.systems.processor_time import DISTURBED
from bench.systems.specdec import NAME, PLAIN
from bench.systems.vllm_verifier import SERVED
from testing.padded_model import LABEL

WORDS = {
    PLAIN: "specdec, plain decoding",
    f"{PLAIN}, no CUDA graphs": "specdec, plain decoding, no CUDA graphs",
    "specdec lookahead": "specdec, n-grams and lookahead",
    "specdec drafted": "specdec, draft service",
    "specdec drafted + lookahead": "specdec, draft service and lookahead",
    "specdec local draft": "specdec, local draft",
    "transformers generate": "transformers, plain decoding",
    "transformers assisted": "transformers, assisted by the draft",
    "transformers assisted, 5": "transformers, assisted by the draft, 5 tokens",
    "transformers prompt lookup": "transformers, prompt lookup",
}
"""Names of configurations in a plot."""


def model_label(directory: Path) -> str:
    """Return the model's name, with a note if it is a padded one."""
    label = json.loads((directory / "config.json").read_text(encoding="utf-8")).get(LABEL)
    if label is None:
        return model_name(directory)
    name = directory.resolve().name
    sizes = f"from {label['source_parameters'] / 1e6:.0f}M to {label['parameters'] / 1e6:.0f}M parameters"
    return f"{name} ({label['source']} PADDED {sizes}: the outputs of its source, the cost of its size)"


def table(report: Report) -> str:
    where = report["machine"]
    rounds = len({each["round"] for each in report["measurements"]})
    lines = [
        f"Target: {report['model']}. Draft: {report['draft'] or 'none'}.",
        f"{_numerics(report)}, prompts of {report['prompts']} continued by {report['tokens']}; "
        f"{where['cores']} cores of {where['processor']}; interleaved rounds: {rounds}, medians.",
    ]
    for temperature in report["temperatures"]:
        lines += ["", f"**T = {temperature:g}.** Tokens a second (over {report['over']}, within a round):", ""]
        lines += _rates(report, temperature)
        lines += [
            "",
            "The best of specdec over the best of each other system, the median ratio within a round:",
            "",
        ]
        lines += leads(report, temperature)
        for streams in dict.fromkeys(streams for _, streams in columns(report)):
            lines += ["", f"T = {temperature:g}, {streams_label(streams)}, all kinds:", ""]
            lines += _details(report, temperature, streams)
    if report["step_times"]:
        lines += ["", "A step of the target alone, ms, by rows:", "", *_step_times(report["step_times"])]
    lines += ["", *_facts(report)]
    return "\n".join(lines) + "\n"


def _numerics(report: Report) -> str:
    """Return the target's data type and, if they are quantised, its weights at specdec."""
    weights = report["weights"]
    return f"{report['dtype']}" if weights == "stored" else f"{report['dtype']} (specdec's weights: {weights})"


def _rates(report: Report, temperature: float) -> list[str]:
    def cell(name: str, column: Column) -> str:
        place = {"temperature": temperature, "kind": column[0], "streams": column[1]}
        mine = found(report, configuration=name, **place)
        if not mine:
            return "-"
        over = ratios(mine, found(report, configuration=report["over"], **place))
        rate = statistics.median(each["tokens_per_second"] for each in mine)
        return f"{rate:.0f} ({statistics.median(over):.2f})" if over else f"{rate:.0f}"

    heads = [f"{kind}, {streams_label(streams)}" for kind, streams in columns(report)]
    rows = ([name, *(cell(name, each) for each in columns(report))] for name in configurations(report))
    return markdown.table(["", *heads], rows)


DETAILS: dict[str, Callable[[list[Report]], str]] = {
    "first token, ms": lambda found: _milliseconds([x for each in found for x in each["first"]], 50),
    "pause p50, ms": lambda found: _milliseconds([x for each in found for x in each["pauses"]], 50),
    "p99": lambda found: _milliseconds([x for each in found for x in each["pauses"]], 99),
    "tokens a step": lambda found: _median(found, "tokens_per_step"),
    "accepted": lambda found: _median(found, "acceptance"),
    "of ideal": lambda found: _median(
        [each | {"efficiency": each["tokens_per_second"] / each["ideal"]} for each in found if each["ideal"]],
        "efficiency",
    ),
    "cores": lambda found: ", ".join(
        f"{part} {statistics.median(each['cores'][part] for each in found):.2f}".strip() for part in found[0]["cores"]
    ),
}


def _details(report: Report, temperature: float, streams: int) -> list[str]:
    rows = (
        [name, *(tell(mine) for tell in DETAILS.values())]
        for name in configurations(report)
        if (mine := found(report, configuration=name, temperature=temperature, streams=streams))
    )
    return markdown.table(["", *DETAILS], rows)


def _step_times(rounds: list[dict[str, float]]) -> list[str]:
    """Return the table of step times by rows: a candidate is one additional row."""
    median = {name: 1e3 * statistics.median(times[name] for times in rounds) for name in rounds[0]}
    target: dict[str, dict[str, str]] = {}
    for name, milliseconds in median.items():
        threads, _, rows = name.partition("/")
        if rows:
            target.setdefault(f"threads: {threads}", {})[rows] = f"{milliseconds:.1f}"
    heads = list(next(iter(target.values())))
    lines = markdown.table(["", *heads], ([threads, *cells.values()] for threads, cells in target.items()))
    if "draft" in median:
        lines.append(f"\nA step of the draft, one row: {median['draft']:.2f} ms.")
    return lines


def _facts(report: Report) -> list[str]:
    """Return lines on the other conditions of the run."""
    memory = [
        f"{name} " + " + ".join(f"{part} {size / 2**20:.0f}".strip() for part, size in parts.items())
        for name, parts in report["peak_bytes"].items()
    ]
    all_ = report["measurements"]
    disturbed = sum(each["foreign_cores"] > DISTURBED for each in all_)
    lines = [f"Memory at its peak, MiB: {'; '.join(memory)}.", "", differences(report), ""]
    lines += [f"Disturbed by other processes (more than {DISTURBED:g} cores): {disturbed} of {len(all_)}."]
    lines += [f"\nNot measured: {name}: {reason}" for name, reason in report["failed"].items()]
    return lines


def differences(report: Report) -> str:
    """Return a sentence for each engine with several configurations: for how many loads their texts differ (never with
    exact numerics)."""
    exact = [name for name in configurations(report) if not name.startswith(PLAIN)]
    engines = [[name for name in exact if name.startswith(words)] for words in (NAME, SERVED)]
    return " ".join(_compared(report, each) for each in engines if len(each) > 1)


def _compared(report: Report, exact: list[str]) -> str:
    answers: dict[tuple[Any, ...], set[int]] = {}
    for each in report["measurements"]:
        if each["configuration"] in exact:
            key = (each["kind"], each["streams"], each["temperature"], each["round"])
            answers.setdefault(key, set()).add(each["text"])
    different = sum(len(texts) > 1 for texts in answers.values())
    return f"Texts of {', '.join(exact)} (the same seeds): compared in {len(answers)} loads, different in {different}."


def plot(report: Report, file: Path) -> None:
    """Plot tokens a second of all configurations: a panel per kind and number of streams, temperatures side by side.
    Without measurements there is no plot."""
    if not report["measurements"]:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    places, names = columns(report), configurations(report)
    figure, panels = pyplot.subplots(
        1,
        len(places),
        figsize=(3 + 2.2 * len(places), 1.5 + 0.35 * len(names)),
        sharey=True,
        layout="constrained",
    )
    height = 0.8 / len(report["temperatures"])
    for axes, (kind, streams) in zip(np.atleast_1d(panels), places, strict=True):
        for number, temperature in enumerate(report["temperatures"]):
            for row, name in enumerate(names):
                rates = [
                    each["tokens_per_second"]
                    for each in found(report, configuration=name, kind=kind, streams=streams, temperature=temperature)
                ]
                if not rates:
                    continue
                middle = statistics.median(rates)
                spread = [[middle - min(rates)], [max(rates) - middle]]
                place, colour = row + number * height, "C0" if name.startswith(NAME) else "C7"
                style = {"color": colour, "alpha": 1.0 - 0.45 * number}
                axes.barh(place, middle, height, xerr=spread, error_kw={"linewidth": 0.8}, **style)
        axes.set_title(f"{kind}, {streams_label(streams)}", fontsize=8)
        axes.set_yticks([row + 0.4 - height / 2 for row in range(len(names))], map(_in_words, names))
        axes.tick_params(labelsize=8)
        axes.grid(visible=True, axis="x", alpha=0.2)
    np.atleast_1d(panels)[0].invert_yaxis()
    figure.supxlabel("tokens a second, all streams together; bars from the least to the most", fontsize=8)
    temperatures = ", then paler ".join(f"T = {each:g}" for each in report["temperatures"])
    figure.suptitle(f"{report['model']}\n{_numerics(report)}, {temperatures}", fontsize=8)
    figure.savefig(file, dpi=150)
    pyplot.close(figure)


def _in_words(name: str) -> str:
    """Return a configuration's name in words: plots are also shown without the page that explains the names."""
    return WORDS.get(name, name)


def _milliseconds(seconds: list[float], percentile: float) -> str:
    return f"{1e3 * float(np.percentile(seconds, percentile)):.1f}" if seconds else "-"


def _median(found: list[Report], name: str) -> str:
    values = [each[name] for each in found if each[name] is not None]
    return f"{statistics.median(values):.2f}" if values else "-"
