"""Upper bounds for compiled grammars: the number of lexer states, and their memory.

The lexer grows while texts follow it, by one state for each new path through the source. All texts of an owner with the
same grammar share a lexer. The library does not report the lexer's size, so a grammar is charged in advance for the
maximum number of states, which is derived from its source: a lexer with counters needs as many states as it counts to;
other lexers need few.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from specdec.grammar.grammar import Grammar, Kind

MIN_STATES = 2048
"""States allowed to any lexer. The random schemas of `test_a_thousand_schemas` need fewer than 500."""

BYTES_A_STATE = 4
"""Bytes of a schema or Lark source per state: most of the source is names and structure. A regular expression or a
choice has one state per byte."""

STATES_A_COUNT = 4
"""States per unit counted: a string of at most n characters takes three per character."""

MAX_STATES = 50_000

STATE_BYTES = 2048
"""Upper bound for the memory of a state, including its expressions. Measured: classes of Unicode characters take 1,700,
`multipleOf` 1,150, bounded strings 400."""

_COUNTED = ("maxLength", "minLength", "maxItems", "minItems", "maxProperties", "minProperties", "multipleOf")
"""Keywords of JSON Schema whose values a lexer may have to count to."""

_REPETITION = re.compile(r"\{\s*+(\d*+)\s*+(?:,\s*+(\d*+)\s*+)?+\}")
"""A repetition in a regular expression: {n}, {n,} or {n,m}."""

_RANGE = re.compile(r"~\s*(\d+)(?:\s*\.\.\s*(\d+))?")
"""Another form of repetition in Lark: ~n or ~n..m."""

_KEYWORD = re.compile(rf'"(?:{"|".join(_COUNTED)})"\s*:\s*([\d.]+)')
"""A keyword of `_COUNTED` in a schema embedded in Lark, with its value."""


def lexer_states(grammar: Grammar) -> int:
    """Return the maximum number of lexer states of a grammar."""
    size = sum(len(text.encode()) for text in grammar.source)
    if grammar.kind in (Kind.JSON_SCHEMA, Kind.LARK):
        size //= BYTES_A_STATE
    return min(MAX_STATES, MIN_STATES + size + STATES_A_COUNT * _counted(grammar))


def growth_bytes(grammar: Grammar) -> int:
    """Return the memory of a lexer with the maximum number of states."""
    return STATE_BYTES * lexer_states(grammar)


def _counted(grammar: Grammar) -> int:
    """Return the sum of all numbers that a grammar's source counts to."""
    (source, *_) = grammar.source
    match grammar.kind:
        case Kind.CHOICE:
            return 0
        case Kind.REGEX:
            return _repetitions(source)
        case Kind.LARK:  # may contain expressions and schemas
            keywords = sum(_count(value.replace(".", "") or "0") for value in _KEYWORD.findall(source))
            return _repetitions(source) + _largest(_RANGE.findall(source)) + keywords
        case Kind.JSON_SCHEMA:
            try:
                schema = json.loads(source)
            except (ValueError, RecursionError):
                return 0  # invalid: compilation will fail
            return _counted_in(schema)


def _counted_in(schema: Any) -> int:
    total, ahead = 0, [schema]
    while ahead:
        match ahead.pop():
            case dict() as found:
                ahead += found.values()
                for key in _COUNTED:
                    value = found.get(key)
                    if value is not None and not isinstance(value, dict):  # a dict: the schema of a property so named
                        digits = re.sub(r"\D", "", repr(value))  # 1.25 becomes 125, which its automaton counts to
                        total += _count(digits or "0") if isinstance(value, int | float) else MAX_STATES
                pattern = found.get("pattern")
                total += _repetitions(pattern) if isinstance(pattern, str) else 0
            case list() as found:
                ahead += found
    return total


def _repetitions(expression: str) -> int:
    return _largest(_REPETITION.findall(expression))


def _largest(ranges: Iterable[tuple[str, str]]) -> int:
    """Return the sum of the larger ends of ranges; an end may be missing."""
    return sum(max(map(_count, filter(None, ends)), default=0) for ends in ranges)


def _count(digits: str) -> int:
    return min(MAX_STATES, int(digits[:9]))
