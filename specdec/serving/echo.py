"""Echoes: input from others, shortened for errors and logs."""

from __future__ import annotations

ECHO_CHARACTERS = 64


def cut(text: str, limit: int) -> str:
    """Return the text cut to at most `limit` bytes of UTF-8; an ellipsis marks the cut."""
    data = text.encode("utf-8", "replace")
    if len(data) <= limit:
        return data.decode("utf-8")
    return data[: limit - 3].decode("utf-8", "ignore") + "..."


def echo(value: object) -> str:
    """Return a short repr for an error message. Only the shown part of a long text is processed."""
    if isinstance(value, str | bytes):
        return repr(value) if len(value) <= ECHO_CHARACTERS else f"{value[:ECHO_CHARACTERS]!r}... ({len(value)} long)"
    return cut(repr(value), ECHO_CHARACTERS)
