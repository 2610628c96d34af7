"""A model's text on a terminal, with control characters neutralised: they could move the cursor, or worse."""

from __future__ import annotations

import sys

from rich.color import ColorSystem
from rich.console import Console

from specdec.client import Chunk

STYLES = {
    "remote_draft": "green",
    "local_model": "green",
    "ngram": "yellow",
    "lookahead": "magenta",
    "grammar": "blue",
    "correction": "red",
    "bonus": "cyan",
    "plain": "default",
}
"""Colours of tokens, by source."""

_CONTROLS = {
    code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"
} | {ord("\r"): None}


def without_controls(text: str) -> str:
    """Return a text with control characters replaced, except line ends and tabs. Carriage returns, which precede line
    ends, are removed."""
    return text.translate(_CONTROLS)


def for_stdout(text: str) -> str:
    """Return a text for stdout: unchanged, unless that is a terminal."""
    return without_controls(text) if sys.stdout.isatty() else text


def styled(text: str, style: str, console: Console) -> str:
    """Return a styled text for a console's terminal. Rich itself would expand tabs, without knowing their column."""
    text = without_controls(text)
    if console.color_system is None or console.no_color:
        return text
    return console.get_style(style).render(text, color_system=ColorSystem.STANDARD)


def coloured(chunk: Chunk, console: Console) -> str:
    """Return a chunk's text for a console's terminal, each token in the colour of its source."""
    begin = chunk.reasoning_tokens
    pieces = zip(chunk.token_texts[begin:], chunk.sources[begin:], strict=True)
    return "".join(styled(piece, STYLES.get(source, "default"), console) for piece, source in pieces)
