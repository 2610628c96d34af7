"""The report of the engine benchmark: tables of step times and of synthetic speculation, and a plot of step times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

WORDS = {
    "specdec": "specdec's engine",
    "eager-dynamic": "transformers, growing cache",
    "eager-static": "transformers, static cache",
    "compiled": "transformers, static cache, compiled",
    "continuous-batching": "transformers, continuous batching",
}
"""Names of systems in the plot."""


def _by_system(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["system"], []).append(row)
    return found


def _place(row: dict[str, Any]) -> tuple[int, int, int]:
    return row["sessions"], row["context"], row["tokens"]


def _cell(row: dict[str, Any], on_gpu: bool) -> str:
    host = f"; {row['host_ms']:.3g}" if on_gpu else ""
    return f"{row['ms']:.3g} ({row['over_roofline']:.2g}){host}"


def table(report: dict[str, Any]) -> str:
    asked, sizes = report["asked"], report["sizes"]
    where = report["machine"].get("device") or report["machine"]["processor"]
    on_gpu = asked["device"] != "cpu"
    threads = f", threads: {asked['threads']}" if not on_gpu else ""
    lines = [
        f"{report['name']}, random weights, {asked['dtype']}, on {where}{threads}: a step reads "
        f"{sizes['read'] / 1e9:.3g} GB of weights and {sizes['kv_token'] / 1e3:.4g} kB for each token of context; "
        f"a large copy moves {report['bandwidth'] / 1e9:.3g} GB/s, read and written.",
        "",
    ]
    systems = _by_system(report["rows"])
    if systems:
        lines += [
            "ms a step (times the roofline)" + ("; then ms until the host had control again." if on_gpu else "."),
            "",
            "| sessions | context | n | roofline, ms | " + " | ".join(systems) + " |",
            "|---" * (4 + len(systems)) + "|",
        ]
        found = {(name, _place(row)): row for name, rows in systems.items() for row in rows}
        rooflines = {_place(row): row["roofline_ms"] for row in report["rows"]}
        for place in sorted(rooflines):
            cells = [_cell(row, on_gpu) if (row := found.get((name, place))) else "-" for name in systems]
            lines.append("| " + " | ".join([*map(str, place), f"{rooflines[place]:.3g}", *cells]) + " |")
    if report["synthetic"]:
        lines += [
            "",
            f"SYNTHETIC: candidates injected into the verifier's step loop, each right with probability "
            f"{asked['synthetic_acceptance']:g}; no draft, no messages. Tokens a step are a session's.",
            "",
            "| sessions | candidates at most | tokens/s | over plain | tokens a step | accepted of verified |",
            "|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {row['sessions']} | {row['width'] or 'plain'} | {row['tokens_per_second']:.4g} | "
            f"{row['over_plain']:.2f} | {row['tokens_per_step']:.2f} | {row['accepted']} of {row['verified']} |"
            for row in report["synthetic"]
        ]
        if not all(row["same_tokens"] for row in report["synthetic"]):
            lines += ["", "Not all runs gave the plain run's tokens: rows depend on their batch here (see --exact)."]
    if report["left_out"]:
        lines += ["", *(f"- {line}" for line in report["left_out"])]
    return "\n".join(lines) + "\n"


def plot(report: dict[str, Any], file: Path) -> None:
    """Plot step times over n, a panel for each number of sessions and context, with the roofline below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = sorted({(row["sessions"], row["context"]) for row in report["rows"]}) or [(0, 0)]
    figure, grid = pyplot.subplots(1, len(panels), figsize=(4 * len(panels), 4), layout="constrained", squeeze=False)
    for axes, (sessions, context) in zip(grid[0], panels, strict=True):
        here = [row for row in report["rows"] if (row["sessions"], row["context"]) == (sessions, context)]
        for name, rows in _by_system(here).items():
            label = WORDS.get(name, name)
            axes.plot([row["tokens"] for row in rows], [row["ms"] for row in rows], marker="o", label=label)
        rooflines = sorted({row["tokens"]: row["roofline_ms"] for row in here}.items())
        axes.plot([n for n, _ in rooflines], [ms for _, ms in rooflines], "k--", label="reading weights and keys alone")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks([n for n, _ in rooflines], [str(n) for n, _ in rooflines])
        axes.set_title(f"sessions: {sessions}, context: {context}", fontsize=9)
        axes.set_xlabel("new tokens of a session")
    grid[0][0].set_ylabel("ms a step")
    grid[0][0].legend(fontsize=7)
    figure.suptitle(f"{report['name']}, random weights, {report['asked']['dtype']}", fontsize=9)
    figure.savefig(file, dpi=150)
    pyplot.close(figure)
