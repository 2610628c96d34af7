"""Origins whose pages may send requests from a browser."""

from __future__ import annotations

import re

import typer

ANY, NULL = "*", "null"
"""Any origin, and the origin of sandboxed pages and of pages from files."""

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[^\s/:@?#\[\]A-Z]+)(:[0-9]{1,5})?")


def origin(text: str) -> str:
    """Parse an origin option; typer.BadParameter for a text that no browser sends as an origin."""
    own_port = (text.startswith("https:") and text.endswith(":443")) or (
        text.startswith("http:") and text.endswith(":80")
    )
    if text not in (ANY, NULL) and (own_port or not text.isascii() or not _ORIGIN.fullmatch(text)):
        raise typer.BadParameter(
            f"{text!r}: an origin is null, * or a scheme, a lower-case host and optionally a non-default port, "
            "without a path or trailing slash, such as https://chat.example.com"
        )
    return text
