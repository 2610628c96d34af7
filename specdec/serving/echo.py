"""Echoes: shortens what others sent, so that errors and logs can repeat it."""

from __future__ import annotations

ECHO_CHARACTERS = 64


def cut(text: str, limit: int) -> str:
    """Return the text in at most `limit` bytes of UTF-8, with an ellipsis if some were left out."""
    data = text.encode("utf-8", "replace")
    if len(data) <= limit:
        return data.decode("utf-8")
    return data[: limit - 3].decode("utf-8", "ignore") + "..."


def echo(value: object) -> str:
    """Return the value as an error message repeats it. Of a long text, only what is shown is looked at."""
    if isinstance(value, str | bytes):
        return repr(value) if len(value) <= ECHO_CHARACTERS else f"{value[:ECHO_CHARACTERS]!r}... ({len(value)} long)"
    return cut(repr(value), ECHO_CHARACTERS)
