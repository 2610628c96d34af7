"""The grammar of a request, as a value: what its text must look like."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

LONGEST_SOURCE = 128 << 10
"""Bytes of a schema, an expression or a grammar; of all choices together."""

MOST_CHOICES = 1024

MAX_NESTING = 100
"""Levels of arrays and objects in a schema's JSON: the library's reader stops at 127."""

MAX_RULES = 1024
"""Rules of a grammar in Lark. What is written by hand has some hundred."""

LONGEST_PROBLEM = 160
"""Characters of a library's words about a grammar that are told."""


class Kind(Enum):
    """The language that a grammar is written in; values as the fields of specdec.v2.Grammar."""

    JSON_SCHEMA = "json_schema"
    """A JSON schema: the text is a value that it describes."""
    REGEX = "regex"
    """A regular expression, without look-around and back-references: it matches the whole text."""
    LARK = "lark"
    """A context-free grammar, as Lark writes them: the text is what `start` derives."""
    CHOICE = "choice"
    """A list of texts, of which the text is one."""


@dataclass(frozen=True)
class Grammar:
    """A grammar. `source` has one entry but for CHOICE; with `after_token` the text is free up to and including the
    first token with that id, the end of its reasoning say, and the grammar holds for the rest. With `opening_token` as
    well, only a text that begins with that token is."""

    kind: Kind
    source: tuple[str, ...]
    after_token: int | None = None
    opening_token: int | None = None


class GrammarError(ValueError):
    """A grammar that cannot be used; the message says why."""


class GrammarTooComplexError(GrammarError):
    """A grammar that takes more work than is allowed, for one text at least."""


def source_violation(kind: Kind, source: Sequence[str]) -> str | None:
    """Return what is wrong with the source of a grammar, as far as it can be told without compiling it."""
    if kind is Kind.CHOICE:
        if not 0 < len(source) <= MOST_CHOICES:
            return f"has {len(source)} texts, must have 1 to {MOST_CHOICES}"
        if not all(source):
            return "has an empty text, must have at least 1 character in each"
    size = sum(len(text.encode()) for text in source)
    if size > LONGEST_SOURCE:
        return f"has {size} bytes, must have at most {LONGEST_SOURCE}"
    if not all(source):
        return "is empty"
    match kind:
        case Kind.JSON_SCHEMA if (levels := _nesting(source[0])) > MAX_NESTING:
            return f"nests arrays and objects in {levels} levels, must be at most {MAX_NESTING}"
        case Kind.LARK if (rules := len(_RULE.findall(source[0]))) > MAX_RULES:
            return f"has {rules} rules, must have at most {MAX_RULES}"
    return None


_RULE = re.compile(r"^[ \t]*[!?]?[A-Za-z_][\w-]*[ \t]*(?:\.-?\d+)?(?:\[[^\]\n]*\])?[ \t]*:", re.MULTILINE)
"""The head of a rule of Lark, with its priority and its attributes."""

_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*+"?|[\[\]{}]', re.DOTALL)
"""A string of JSON, or a bracket outside of strings. A string that is not closed goes to the end: looking for brackets
behind each of its quotes would take quadratic time."""


def _nesting(source: str) -> int:
    """Return how deep arrays and objects of a JSON text lie within each other; of what is no JSON, how deep they
    seem to."""
    depth = deepest = 0
    for found in _BRACKET.finditer(source):
        if found[0] in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif found[0] in "]}":
            depth -= 1
    return deepest


def lark_string(text: str) -> str:
    """Return a text as a string of Lark, between quotes."""
    escaped = re.sub(r'[\\"]', lambda found: "\\" + found[0], text)
    return '"' + re.sub(r"[\x00-\x1f\x7f]", lambda found: f"\\x{ord(found[0]):02x}", escaped) + '"'
