"""Strings: `format` and `pattern`; the latter also applies to names of properties.

Expressions are rewritten into llguidance's syntax (`specdec.grammar.languages`).
"""

from __future__ import annotations

from collections.abc import Callable

from specdec.grammar.json_schema.rewriter import Rewrite, Rewriter, refused
from specdec.grammar.json_schema.values import is_one_of
from specdec.grammar.patterns import PatternError, PatternTooLargeError, UnreadableError

LIBRARY_FORMATS = frozenset(
    ["date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"]
)
"""Formats of strings that llguidance enforces."""

FORMAT_PATTERNS = {
    "json-pointer": "^(?:/(?:[^~/]|~[01])*)*$",
    "relative-json-pointer": "^(?:0|[1-9][0-9]*)(?:#|(?:/(?:[^~/]|~[01])*)*)$",
} | {
    f"uuid{version}": f"^[0-9a-fA-F]{{8}}-[0-9a-fA-F]{{4}}-{version}[0-9a-fA-F]{{3}}"
    "-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12}$"
    for version in range(1, 9)
}
"""Further formats, as expressions: JSON Schema's own, and pydantic's."""


def rewrite_string(rewriter: Rewriter, part: Rewrite) -> None:
    patterns = []
    if is_one_of(name := part.source.get("format"), LIBRARY_FORMATS):
        part.keywords["format"] = name
    elif is_one_of(name, FORMAT_PATTERNS):
        patterns.append(FORMAT_PATTERNS[name])
    if isinstance(pattern := part.source.get("pattern"), str):
        patterns += _rewritten(rewriter, pattern, part.place, "pattern", rewriter.languages.patterns)
    elif pattern is not None:
        part.keywords["pattern"] = pattern
    if patterns:
        part.keywords["pattern"] = patterns[0]
        part.conditions.extend({"pattern": pattern} for pattern in patterns[1:])


def name_pattern(rewriter: Rewriter, pattern: str, place: str) -> str:
    """Return an equivalent expression for names of properties."""
    languages = rewriter.languages
    (found,) = _rewritten(rewriter, pattern, place, pattern, lambda language: [languages.pattern(language)])
    return found


def _rewritten(rewriter: Rewriter, pattern: str, place: str, key: str, spelt: Callable[[int], list[str]]) -> list[str]:
    """Return expressions that together are equivalent to `pattern`; `spelt` makes them from its language. An expression
    stays unchanged if it cannot be parsed here, or if it is too large but needs no rewriting."""
    rewriter.count(place, len(pattern))
    try:
        return spelt(rewriter.languages.of_pattern(pattern))
    except UnreadableError:
        return [pattern]
    except PatternError as error:
        if isinstance(error, PatternTooLargeError) and "(?=" not in pattern and "(?!" not in pattern:
            return [pattern]
        raise refused(place, key, f"it {error}") from None
