"""Print the table of docs/when-something-is-wrong.md: `python -m tests.mistakes`."""

from __future__ import annotations

from tests.mistakes.commands import ASKED, MISTAKES, Mistake


def table() -> str:
    """Return the table in Markdown."""

    def row(each: Mistake) -> str:
        command, says = (text.replace("|", "\\|") for text in (each.command, each.says))
        return f"| `{command}` | {each.status.value} | {says} |"

    return "\n".join(("| Command | Status | It says |", "|---|---|---|", *map(row, (*MISTAKES, *ASKED))))


if __name__ == "__main__":
    print(table())
