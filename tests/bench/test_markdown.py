"""Tables in Markdown."""

from __future__ import annotations

from bench import markdown


def test_a_table_has_a_row_for_each() -> None:
    lines = markdown.table(["", "a", 2], ([name, number, None] for number, name in enumerate("xy")))
    assert lines == ["|  | a | 2 |", "|---|---|---|", "| x | 0 | None |", "| y | 1 | None |"]
    assert lines[:2] == markdown.head(["", "a", 2]).split("\n")
    assert lines[2] == markdown.row(["x", 0, None])
