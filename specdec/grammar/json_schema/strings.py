"""Strings: `format` and `pattern`; the latter also applies to names of properties.

Expressions are rewritten into llguidance's syntax (`specdec.grammar.languages`).
"""

from __future__ import annotations

from collections.abc import Callable

from specdec.grammar.json_schema.rewriter import Rewrite, Rewriter, refused
from specdec.grammar.json_schema.values import is_one_of
from specdec.grammar.patterns import InvalidPatternError, PatternError, PatternTooLargeError, UnreadableError

LIBRARY_FORMATS = frozenset(["duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"])
"""Formats of strings that llguidance enforces."""

_MULTIPLE_OF_4 = "(?:[02468][048]|[13579][26])"  # of two digits
_DATE = (
    "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    f"|(?:[0-9]{{2}}(?:0[48]|[2468][048]|[13579][26])|{_MULTIPLE_OF_4}00)-02-29)"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"

FORMAT_PATTERNS = {
    "date": f"^{_DATE}$",
    "date-time": f"^{_DATE}[tT]{_TIME}$",
    "time": f"^{_TIME}$",
    "json-pointer": "^(?:/(?:[^~/]|~[01])*)*$",
    "relative-json-pointer": "^(?:0|[1-9][0-9]*)(?:#|(?:/(?:[^~/]|~[01])*)*)$",
} | {
    f"uuid{version}": f"^[0-9a-fA-F]{{8}}-[0-9a-fA-F]{{4}}-{version}[0-9a-fA-F]{{3}}"
    "-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12}$"
    for version in range(1, 9)
}
"""Other formats, as expressions: JSON Schema's own, and pydantic's. llguidance knows dates and times too, but allows
February 29 in every year and a leap second in every minute."""


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
    except InvalidPatternError as error:
        raise refused(place, key, f"it {error}") from None
    except UnreadableError:
        return [pattern]
    except PatternError as error:
        if isinstance(error, PatternTooLargeError) and "(?=" not in pattern and "(?!" not in pattern:
            return [pattern]
        raise refused(place, key, f"it {error}") from None
