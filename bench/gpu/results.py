"""The results in the folder of one step of a GPU run: its figures, counts of tests, and tables."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

FIGURES = "figures.json"
"""File of the figures of a step's program."""

TESTS = "tests.xml"
"""File of pytest's results (`--junitxml`)."""

MAX_REASONS = 20


def keep(folder: Path, found: dict[str, Any]) -> None:
    """Write figures into a step's folder, and print them, a line each."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FIGURES).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    for name, value in found.items():
        print(f"{name}: {value}", flush=True)


def figures(folder: Path) -> dict[str, Any]:
    """Return the figures and the counts of tests in a step's folder, without those absent or truncated."""
    try:
        found: dict[str, Any] = json.loads((folder / FIGURES).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = {}
    return found | _tests(folder / TESTS)


def tables(folder: Path) -> dict[str, str]:
    return {file.stem: file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.md"))}


def _tests(file: Path) -> dict[str, Any]:
    """Return the number of passed tests, the names of the first MAX_REASONS failed ones, and the number of skipped ones
    by reason."""
    try:
        cases = list(ElementTree.parse(file).iter("testcase"))
    except (OSError, ElementTree.ParseError):
        return {}
    failed, skipped = [], Counter[str]()
    for case in cases:
        kinds = {child.tag: child for child in case}
        if "failure" in kinds or "error" in kinds:
            failed.append(f"{case.get('classname')}::{case.get('name')}")
        elif "skipped" in kinds:
            skipped[str(kinds["skipped"].get("message"))] += 1
    passed = len(cases) - len(failed) - skipped.total()
    return {"passed": passed, "failed": failed[:MAX_REASONS], "skipped": dict(skipped.most_common(MAX_REASONS))}
