"""The plots of an evaluation: speed-up of all methods, and figures as in individual papers if their methods ran."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from bench.papers.evaluation import Cell
from bench.papers.methods import PLAIN
from bench.papers.report import PLACES, chains
from bench.report import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RULES = {"assisted": "assisted (greedy)", "coupled": "COUPLED", "rejection": "REJECTION"}


def plot(report: Report, file: Path) -> None:
    """Plot the speed-up of all methods into `file`, and if measured, into files beside it: acceptance by position
    (-acceptance), run time by tokens drafted (-drafted), tokens by rows of lookahead windows (-windows). Without
    measurements there is no plot."""
    if not report["cells"]:
        return
    import matplotlib

    matplotlib.use("Agg")
    _figure(report["cells"], file, _speed_ups, height=0.3 * max(len(cell["methods"]) for cell in report["cells"]) + 1.2)
    _figure(report["cells"], file.with_stem(f"{file.stem}-acceptance"), _acceptance)
    if drafted := [cell for cell in report["cells"] if chains(cell)]:
        _figure(drafted, file.with_stem(f"{file.stem}-drafted"), _run_times)
    if windows := [cell for cell in report["cells"] if len(_windows(cell)) > 1]:
        _figure(windows, file.with_stem(f"{file.stem}-windows"), _window_gains)


def _figure(cells: list[Report], file: Path, draw: Callable[[Axes, Report], None], height: float = 4.0) -> None:
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        1, len(cells), figsize=(1 + 4.5 * len(cells), height), squeeze=False, layout="constrained"
    )
    for axes, cell in zip(panels[0], cells, strict=True):
        draw(axes, cell)
        axes.set_title(str(Cell(cell["temperature"], cell["streams"])), fontsize=9)
        axes.tick_params(labelsize=8)
        axes.grid(visible=True, alpha=0.2)
    figure.savefig(file, dpi=150)
    pyplot.close(figure)


def _speed_ups(axes: Axes, cell: Report) -> None:
    known = {name: summary for name, summary in cell["methods"].items() if summary["speed_up"] is not None}
    for row, summary in enumerate(known.values()):
        axes.barh(row, summary["speed_up"], 0.7, xerr=summary["speed_up_deviation"], color="C0", ecolor="C7")
    axes.axvline(1.0, linestyle="--", color="C7", linewidth=0.8)
    axes.set_yticks(range(len(known)), list(known))
    axes.invert_yaxis()
    axes.set_xlabel("speed-up over plain decoding", fontsize=8)


def _acceptance(axes: Axes, cell: Report) -> None:
    for name, summary in cell["methods"].items():
        rates = summary["conditional_acceptance"][:PLACES]
        if name != PLAIN and rates:
            axes.plot(range(1, len(rates) + 1), rates, marker="o", markersize=3, linewidth=1, label=name)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("position ahead", fontsize=8)
    axes.set_ylabel("accepted, if all before it are", fontsize=8)
    if axes.lines:
        axes.legend(fontsize=6, ncols=2)


def _run_times(axes: Axes, cell: Report) -> None:
    for number, (rule, chain) in enumerate(chains(cell).items()):
        quartiles = [summary["milliseconds_a_token"] for summary in chain.values()]
        middle = [median for _, median, _ in quartiles]
        bars = [[median - low for low, median, _ in quartiles], [high - median for _, median, high in quartiles]]
        axes.errorbar(
            list(chain), middle, yerr=bars, marker="o", capsize=3, color=f"C{number}", label=RULES.get(rule, rule)
        )
    _, plain, _ = cell["methods"][PLAIN]["milliseconds_a_token"]
    axes.axhline(plain, linestyle="--", color="C7", label="naive: plain decoding")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens drafted", fontsize=8)
    axes.set_ylabel("ms a token; median and quartiles of questions", fontsize=8)
    axes.legend(fontsize=8)


def _windows(cell: Report) -> dict[str, Report]:
    """Return the summaries of methods with a lookahead window of a fixed size."""
    return {name: summary for name, summary in cell["methods"].items() if summary["window"] is not None}


def _window_gains(axes: Axes, cell: Report) -> None:
    for number, (name, summary) in enumerate(_windows(cell).items()):
        axes.plot(summary["rows_a_step"], summary["tokens_a_step"], marker="o", linestyle="", color=f"C{number % 10}")
        axes.annotate(name, (summary["rows_a_step"], summary["tokens_a_step"]), fontsize=7)
    axes.axhline(1.0, linestyle="--", color="C7", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlabel("rows a step: FLOPs over those of plain decoding", fontsize=8)
    axes.set_ylabel("tokens a step: steps saved", fontsize=8)
