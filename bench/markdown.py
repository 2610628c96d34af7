"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable


def row(cells: Iterable[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def head(columns: Iterable[object]) -> str:
    """Return the two lines above the rows."""
    columns = list(columns)
    return row(columns) + "\n" + "|---" * len(columns) + "|"


def table(columns: Iterable[object], rows: Iterable[Iterable[object]]) -> list[str]:
    """Return a table's lines."""
    return [*head(columns).split("\n"), *map(row, rows)]
