"""The report of the benchmark of learning drafts: guessed tokens and speed over the texts of each run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench import markdown
from bench.report import Report

if TYPE_CHECKING:
    from bench.serving.learning import Text

WINDOW = 20
"""Texts per window; shares and speeds are computed for each window."""


def summary(texts: Sequence[Text]) -> dict[str, Any]:
    """Return windows and phases of a run, whose texts are in the order in which they ended."""
    windows, begin = [], 0.0
    for first in range(0, len(texts), WINDOW):
        own = texts[first : first + WINDOW]
        tokens, end = sum(len(text.tokens) for text in own), own[-1].ended
        windows.append(
            {
                "texts": first + len(own),
                "ended": end,
                "phase": own[-1].phase,
                "guessed": sum(text.guessed for text in own) / tokens,
                "tokens_per_second": tokens / (end - begin),
            }
        )
        begin = end
    phases, begin = [], 0.0
    for phase in sorted({text.phase for text in texts}):
        own = [text for text in texts if text.phase == phase]
        tokens, end = sum(len(text.tokens) for text in own), own[-1].ended
        gaps = np.concatenate([text.gaps for text in own])
        phases.append(
            {
                "guessed": sum(text.guessed for text in own) / tokens,
                "tokens_per_second": tokens / (end - begin),
                "gap_ms": {f"p{quantile}": 1000 * float(np.percentile(gaps, quantile)) for quantile in (50, 99)},
            }
        )
        begin = end
    return {"windows": windows, "phases": phases}


def pays_from(report: Report) -> float | None:
    """Return the seconds after which the learning draft was never slower than plain decoding in the first phase; None
    if there is no such time."""
    plain = report["runs"]["plain"]["phases"][0]["tokens_per_second"]
    begin: float | None = None
    for window in report["runs"]["learning"]["windows"]:
        if window["phase"] == 0:
            pays = window["tokens_per_second"] >= plain
            begin = None if not pays else window["ended"] if begin is None else begin
    return begin


def table(report: Report) -> str:
    plan, runs = report["plan"], report["runs"]
    lines = [
        f"Target: {plan['target']}. First draft: {plan['draft']}. T = {plan['temperature']:g}; {plan['texts']} texts a "
        f"phase, {plan['tokens']} tokens each, {plan['streams']} at once.",
        "",
    ]
    heads = [f"{kind}: {what}" for kind in plan["phases"] for what in ("guessed", "tokens/s", "p50, p99 (ms)")]
    rows = [
        [
            name,
            *(
                cell
                for phase in found["phases"]
                for cell in (
                    f"{phase['guessed']:.0%}",
                    f"{phase['tokens_per_second']:.0f}",
                    f"{phase['gap_ms']['p50']:.0f}, {phase['gap_ms']['p99']:.0f}",
                )
            ),
        ]
        for name, found in runs.items()
    ]
    lines += markdown.table(["run", *heads], rows)
    tried = [
        f"{version['name']}: {version['verdict']}"
        + ("" if version["decided"] is None else f" at {version['decided']:.0f} s")
        + f", trained at {version['trained']:.0f} s"
        for version in runs["learning"]["versions"]
    ]
    pays = pays_from(report)
    lines += [
        "",
        "Versions: " + ("; ".join(tried) or "none") + ".",
        "As fast as plain decoding: " + ("not in the first phase." if pays is None else f"after {pays:.0f} s."),
        f"Texts that differ from the plain run's: {sum(found['different_texts'] for found in runs.values())}.",
    ]
    return "\n".join(lines) + "\n"


def plot(report: Report, file: Path) -> None:
    """Plot guessed share and speed over texts, a line for each run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(2, 1, figsize=(8, 6), layout="constrained", sharex=True)
    for axes, key, label in zip(
        panels, ("guessed", "tokens_per_second"), ("tokens that the draft guessed", "tokens/s"), strict=True
    ):
        for number, (name, found) in enumerate(report["runs"].items()):
            if name != "plain" or key != "guessed":
                texts, values = zip(*((window["texts"], window[key]) for window in found["windows"]), strict=True)
                axes.plot(texts, values, label=name, color=f"C{number}")  # the same in both panels
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        for phase in range(1, len(report["plan"]["phases"])):
            axes.axvline(phase * report["plan"]["texts"], color="grey", linewidth=0.8)
    panels[1].set_xlabel("texts (" + ", then ".join(report["plan"]["phases"]) + ")")
    panels[1].legend()
    figure.savefig(file, dpi=150)
    pyplot.close(figure)
