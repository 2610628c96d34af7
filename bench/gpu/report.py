"""The report of a run on a GPU: one page, and the same as JSON. It is rewritten after every step, so that the results
so far survive the loss of the machine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench import markdown
from bench.gpu.probe import Facts
from bench.gpu.runner import Outcome


def write(out: Path, about: dict[str, Any], facts: Facts, outcomes: Sequence[Outcome]) -> None:
    report = {**about, "facts": facts, "steps": [asdict(outcome) for outcome in outcomes]}
    (out / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    (out / "report.md").write_text(page(about, facts, outcomes), encoding="utf-8")


def page(about: dict[str, Any], facts: Facts, outcomes: Sequence[Outcome]) -> str:
    lines = [f"# A run on {about['device']}", "", *_place(about, facts), ""]
    rows = ([each.name, each.status, f"{each.seconds:.0f}", each.reason or each.about] for each in outcomes)
    lines += markdown.table(["step", "status", "s", ""], rows)
    for each in outcomes:
        lines += ["", f"## {each.name}: {each.status}", "", f"{each.about}.", *_details(each)]
    return "\n".join(lines) + "\n"


def _place(about: dict[str, Any], facts: Facts) -> list[str]:
    gpu = facts["gpu"]
    card = "no GPU"
    if gpu is not None:
        card = f"{gpu['name']}, {gpu['gib']} GiB, capability {gpu['capability']}, CUDA {gpu['cuda']}"
    versions = ", ".join(f"{name} {version}" for name, version in facts["modules"].items() if version is not None)
    if about["device"] == "cpu":
        card = f"In small, on the CPU: a rehearsal that measures nothing ({card})"
    return [
        f"{card}; driver {facts['driver'] or 'unknown'}.",
        "",
        f"{about['machine']['processor']}, {about['machine']['cores']} cores; Python {about['versions']['python']}, "
        f"specdec at {about['versions']['commit']}; ONNX Runtime has {', '.join(facts['providers']) or 'nothing'}.",
        "",
        f"Versions: {versions}.",
    ]


def _details(each: Outcome) -> list[str]:
    lines = [""] * bool(each.figures) + [f"- {name}: {value}" for name, value in each.figures.items()]
    for name, table in each.tables.items():
        lines += ["", f"### {name}", "", table.strip()]
    if each.status in ("failed", "timed out"):
        lines += ["", "The end of its log:", "", "```", each.log_tail.strip().replace("```", "'''"), "```"]
    return lines
