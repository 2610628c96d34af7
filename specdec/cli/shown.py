"""A model's text on a terminal, with control characters neutralised: they could move the cursor, or do worse."""

from __future__ import annotations

import sys

from rich.color import ColorSystem
from rich.console import Console

from specdec.client import Chunk, Speculation
from specdec.wire.decisions import PROPOSERS

STYLES = {
    "remote_draft": "green",
    "local_model": "green",
    "heads": "green",
    "ngram": "yellow",
    "lookahead": "magenta",
    "grammar": "blue",
    "correction": "red",
    "bonus": "cyan",
    "plain": "default",
}
"""Colours of tokens, by source."""

SOURCES = dict(PROPOSERS) | {
    "bonus": "target after candidates",
    "correction": "target instead of a candidate",
    "plain": "target without candidates",
}
"""Sources of tokens in words for people."""

_CONTROLS = {
    code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"
} | {ord("\r"): None}


def without_controls(text: str) -> str:
    """Return a text with control characters replaced, except line ends and tabs. Carriage returns are removed."""
    return text.translate(_CONTROLS)


def for_stdout(text: str) -> str:
    """Return a text for stdout: unchanged unless stdout is a terminal."""
    return without_controls(text) if sys.stdout.isatty() else text


def styled(text: str, style: str, console: Console) -> str:
    """Return a styled text for a console's terminal. Rich's printing would expand tabs without knowing their column."""
    text = without_controls(text)
    if console.color_system is None or console.no_color:
        return text
    return console.get_style(style).render(text, color_system=ColorSystem.STANDARD)


def coloured(chunk: Chunk, console: Console) -> str:
    """Return a chunk's text for a console's terminal, each token in the colour of its source."""
    begin = chunk.reasoning_tokens
    pieces = zip(chunk.token_texts[begin:], chunk.sources[begin:], strict=True)
    return "".join(styled(piece, STYLES.get(source, "default"), console) for piece, source in pieces)


def speculation_lines(speculation: Speculation, console: Console, *, in_colours: bool) -> list[str]:
    """Return lines of a summary: the tokens by source, and the modes, with why steps had no candidates. With
    `in_colours`, the first line is also the legend: each source has the colour of its tokens."""
    counts = sorted(speculation.sources.items(), key=lambda entry: -entry[1])
    from_where = [
        styled(f"{SOURCES.get(source, source)} {count}", STYLES.get(source, "dim") if in_colours else "dim", console)
        for source, count in counts
    ]
    lines = []
    if from_where:
        lines.append(styled("tokens by source: ", "dim", console) + styled(", ", "dim", console).join(from_where))
    if speculation.decisions.why:
        lines.append(styled(f"speculation mode {speculation.decisions.why}", "dim", console))
    return lines
