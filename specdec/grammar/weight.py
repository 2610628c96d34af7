"""What a compiled grammar may weigh: how many states its lexer may have, and what they take.

The lexer grows while texts follow it, by a state for each new way through the source. All texts of an owner with the
same grammar share it. How large it has become cannot be asked, so a grammar is charged from the beginning for all the
states that it may have. That number follows from its source: a lexer that has to count needs as many states as it
counts to, others need few.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from specdec.grammar.grammar import Grammar, Kind

LEAST_STATES = 2048
"""States that any lexer may have. Those of the random schemas of `test_a_thousand_schemas` have fewer than 500."""

BYTES_A_STATE = 4
"""Bytes of a schema, or of a source in Lark, for each state: most of it is names and structure. An expression or a
choice has a state for each of its bytes."""

STATES_A_COUNT = 4
"""States for each that a source counts to: a string of at most n characters takes three for each that it has."""

MOST_STATES = 50_000

STATE_BYTES = 2048
"""Bytes of a state at most, with the expressions that belong to it. As measured: classes of Unicode characters take
1,700, `multipleOf` 1,150, bounded strings 400."""

_COUNTED = ("maxLength", "minLength", "maxItems", "minItems", "maxProperties", "minProperties", "multipleOf")
"""Keywords of JSON Schema whose values a lexer may have to count to."""

_REPETITION = re.compile(r"\{\s*(\d*)\s*(?:,\s*(\d*)\s*)?\}")
"""A repetition in a regular expression: {n}, {n,} or {n,m}."""

_RANGE = re.compile(r"~\s*(\d+)(?:\s*\.\.\s*(\d+))?")
"""A repetition in Lark besides these: ~n or ~n..m."""

_KEYWORD = re.compile(rf'"(?:{"|".join(_COUNTED)})"\s*:\s*([\d.]+)')
"""Such a keyword of a schema within Lark, with its value."""


def lexer_states(grammar: Grammar) -> int:
    """Return how many states the lexer of a grammar may have."""
    size = sum(len(text.encode()) for text in grammar.source)
    if grammar.kind in (Kind.JSON_SCHEMA, Kind.LARK):
        size //= BYTES_A_STATE
    return min(MOST_STATES, LEAST_STATES + size + STATES_A_COUNT * _counted(grammar))


def growth_bytes(grammar: Grammar) -> int:
    """Return the bytes that a lexer of so many states takes at most."""
    return STATE_BYTES * lexer_states(grammar)


def _counted(grammar: Grammar) -> int:
    """Return the sum of all numbers that the source of a grammar counts to."""
    (source, *_) = grammar.source
    match grammar.kind:
        case Kind.CHOICE:
            return 0
        case Kind.REGEX:
            return _repetitions(source)
        case Kind.LARK:  # which may hold expressions and schemas
            keywords = sum(_count(value.replace(".", "") or "0") for value in _KEYWORD.findall(source))
            return _repetitions(source) + _largest(_RANGE.findall(source)) + keywords
        case Kind.JSON_SCHEMA:
            try:
                schema = json.loads(source)
            except (ValueError, RecursionError):
                return 0  # it cannot be compiled either
            return _counted_in(schema)


def _counted_in(schema: Any) -> int:
    total, ahead = 0, [schema]
    while ahead:
        match ahead.pop():
            case dict() as found:
                ahead += found.values()
                for key in _COUNTED:
                    if (value := found.get(key)) is not None:
                        digits = re.sub(r"\D", "", repr(value))  # of 1.25 as well: its automaton counts to 125
                        total += _count(digits or "0") if isinstance(value, int | float) else MOST_STATES
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
    return min(MOST_STATES, int(digits[:9]))
