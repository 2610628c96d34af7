"""The grammar of a request as a value: a constraint on its text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

MAX_SOURCE_BYTES = 128 << 10
"""Maximum bytes of a schema, an expression or a grammar, or of all choices in total."""

MAX_CHOICES = 1024

MAX_NESTING = 100
"""Maximum nesting of arrays and objects in a schema's JSON: the library's parser stops at 127."""

MAX_RULES = 1024
"""Maximum rules of a Lark grammar. Hand-written ones have a few hundred."""

MAX_PROBLEM_CHARACTERS = 160
"""Maximum characters of the library's message in an error about a grammar."""


class Kind(Enum):
    """The language of a grammar's source; values are the fields of specdec.v2.Grammar."""

    JSON_SCHEMA = "json_schema"
    """A JSON schema: the text is a JSON value that validates against it."""
    REGEX = "regex"
    """A regular expression, without look-around and back-references, that matches the whole text."""
    LARK = "lark"
    """A context-free grammar in Lark's syntax: the text is derived from `start`."""
    CHOICE = "choice"
    """A list of texts: the text is one of them."""


@dataclass(frozen=True)
class Grammar:
    """A grammar. `source` has one entry, or several for CHOICE. With `after_token` the text is free up to and including
    the first token with this id (for example the end of its reasoning); the grammar applies to the rest. With
    `opening_token` as well, this holds only for a text that begins with that token; any other text is constrained from
    its start."""

    kind: Kind
    source: tuple[str, ...]
    after_token: int | None = None
    opening_token: int | None = None


class GrammarError(ValueError):
    """A grammar cannot be used; the message gives the reason."""


class GrammarTooComplexError(GrammarError):
    """A grammar exceeds the work limits, at least for one text."""


def source_violation(kind: Kind, source: Sequence[str]) -> str | None:
    """Return a problem of a grammar's source that is visible without compiling it; None if there is none."""
    if kind is Kind.CHOICE:
        if not 0 < len(source) <= MAX_CHOICES:
            return f"has {len(source)} texts, must have 1 to {MAX_CHOICES}"
        if not all(source):
            return "has an empty text, must have at least 1 character in each"
    size = sum(len(text.encode()) for text in source)
    if size > MAX_SOURCE_BYTES:
        return f"has {size} bytes, must have at most {MAX_SOURCE_BYTES}"
    if not all(source):
        return "is empty"
    match kind:
        case Kind.JSON_SCHEMA if (levels := _nesting(source[0])) > MAX_NESTING:
            return f"has {levels} levels of arrays and objects, must have at most {MAX_NESTING}"
        case Kind.LARK if (rules := len(_RULE.findall(source[0]))) > MAX_RULES:
            return f"has {rules} rules, must have at most {MAX_RULES}"
    return None


_RULE = re.compile(
    r"^[ \t]*+[!?]?[A-Za-z_][\w-]*+[ \t]*+(?:\.-?\d++[ \t]*+)?+(?:\[[^\]\n]*+\][ \t]*+)?+:", re.MULTILINE
)
"""The head of a Lark rule, with its priority and its attributes."""

_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*+"?|[\[\]{}]', re.DOTALL)
"""A JSON string, or a bracket outside strings. An unclosed string matches up to the end of the text: otherwise a search
would start at each of its escaped quotes, in quadratic time."""


def _nesting(source: str) -> int:
    """Return the nesting depth of arrays and objects in a JSON text; for other text, the apparent depth."""
    depth = deepest = 0
    for found in _BRACKET.finditer(source):
        if found[0] in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif found[0] in "]}":
            depth -= 1
    return deepest


def lark_string(text: str) -> str:
    """Return a text as a quoted Lark string."""
    escaped = re.sub(r'[\\"]', lambda found: "\\" + found[0], text)
    return '"' + re.sub(r"[\x00-\x1f\x7f]", lambda found: f"\\x{ord(found[0]):02x}", escaped) + '"'
