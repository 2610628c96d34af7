"""A report as files: what was measured, the table that a person reads, a plot."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Report = dict[str, Any]


def publish(
    report: Report, folder: Path, name: str, table: Callable[[Report], str], plot: Callable[[Report, Path], None]
) -> None:
    """Write `name`.json, .md and .png into the folder, which is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    (folder / f"{name}.md").write_text(table(report), encoding="utf-8")
    plot(report, folder / f"{name}.png")
