"""Everything that scans a caller's text takes time linear in its length: a regular expression that backtracks would
take quadratic time or more, and `re` holds the GIL meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import product

import pytest

from specdec.grammar.ebnf import in_lark, is_ebnf
from specdec.grammar.grammar import Grammar, GrammarError, Kind, source_violation
from specdec.grammar.weight import lexer_states
from specdec.openai_api.errors import ApiError
from specdec.openai_api.structure import Structure
from specdec.wire.tool_calls import ToolCallReader
from specdec.wire.tool_formats import HERMES, MISTRAL_ARGS, QWEN_CODER
from tests.cpu_time import taking_less_than

SIZES = (600, 16_000)
"""Repetitions in a run. At the first size an expression of cubic time is noticed, at the second one of quadratic time:
either takes at least twice the limit."""

LIMIT_SECONDS = 0.1
"""CPU time allowed for one text: linear time is less than a fifth of this."""

BEGINS = (
    *("", "{", "{1", "~", "~1", '"', '{"name":', '"maxLength"', "[", "\\", "#"),
    *("a", "a.1", "a[", 'root ::= "a"', 'root ::= "a"{', 'root ::= "a"{1', "root ::= [", "root ::= a"),
)
RUNS = (" ", "1", "a", "a ", '"', '\\"', "\\", "[", "{", "<")
BETWEEN = (",", ":", ".")


def texts(size: int) -> Iterator[str]:
    for begin, run in product(BEGINS, RUNS):
        yield begin + run * size
        yield from (begin + run * (size // 2) + sign + run * (size // 2) for sign in BETWEEN)


def in_lark_or_refused(text: str) -> None:
    with suppress(GrammarError):
        in_lark(text)


def counted_or_refused(text: str) -> None:
    with suppress(ApiError):
        asyncio.run(Structure().add(text.encode()))


def read_as_calls(text: str) -> None:
    for tool_format in (HERMES, MISTRAL_ARGS, QWEN_CODER):
        reader = ToolCallReader(tool_format)
        list(reader.push(tool_format.marker + text))
        list(reader.finish(cut=True))


SCANNERS: dict[str, Callable[[str], object]] = {
    "is_ebnf": is_ebnf,
    "in_lark": in_lark_or_refused,
    "a Lark source": lambda text: source_violation(Kind.LARK, [text]),
    "a schema's source": lambda text: source_violation(Kind.JSON_SCHEMA, [text]),
    "states of a Lark grammar": lambda text: lexer_states(Grammar(Kind.LARK, (text,))),
    "states of an expression": lambda text: lexer_states(Grammar(Kind.REGEX, (text,))),
    "calls": read_as_calls,
    "a body": counted_or_refused,
}


@pytest.mark.parametrize("scanner", SCANNERS)
def test_time_is_linear(scanner: str) -> None:
    for size in SIZES:
        for text in texts(size):
            with taking_less_than(LIMIT_SECONDS, text[:20]):
                SCANNERS[scanner](text)
