"""The report of the engine benchmark: tables of step times and of synthetic speculation."""

from __future__ import annotations

from typing import Any

from bench import markdown


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
            markdown.head(["sessions", "context", "n", "roofline, ms", *systems]),
        ]
        found = {(name, _place(row)): row for name, rows in systems.items() for row in rows}
        rooflines = {_place(row): row["roofline_ms"] for row in report["rows"]}
        for place in sorted(rooflines):
            cells = [_cell(row, on_gpu) if (row := found.get((name, place))) else "-" for name in systems]
            lines.append(markdown.row([*place, f"{rooflines[place]:.3g}", *cells]))
    if report["synthetic"]:
        lines += [
            "",
            f"SYNTHETIC: candidates injected into the verifier's step loop, each right with probability "
            f"{asked['synthetic_acceptance']:g}; no draft, no messages. Tokens a step are a session's.",
            "",
        ]
        lines += markdown.table(
            ["sessions", "candidates at most", "tokens/s", "over plain", "tokens a step", "accepted of verified"],
            (
                [
                    row["sessions"],
                    row["width"] or "plain",
                    f"{row['tokens_per_second']:.4g}",
                    f"{row['over_plain']:.2f}",
                    f"{row['tokens_per_step']:.2f}",
                    f"{row['accepted']} of {row['verified']}",
                ]
                for row in report["synthetic"]
            ),
        )
        if not all(row["same_tokens"] for row in report["synthetic"]):
            lines += ["", "Not all runs gave the plain run's tokens: rows depend on their batch here (see --exact)."]
    if report["left_out"]:
        lines += ["", *(f"- {line}" for line in report["left_out"])]
    return "\n".join(lines) + "\n"
