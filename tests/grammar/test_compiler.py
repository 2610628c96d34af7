"""Compiled grammars are cached per owner; a grammar that has reached a limit of the library is replaced."""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path
from typing import Any

import pytest

from orchestrator.requests.tagged_grammar import json_rule
from specdec.engine.model_directory import ModelDirectory
from specdec.grammar import compiler as module
from specdec.grammar.compiler import GrammarCompiler
from specdec.grammar.grammar import Grammar, GrammarError, GrammarTooComplexError, Kind
from specdec.grammar.text_grammar import TextGrammar
from specdec.text.tokenizer import Tokenizer
from tests.grammar.followed import Followed

DEMO = ModelDirectory(Path(__file__).parent.parent.parent / "demo" / "target")
TOKENIZER = Tokenizer(DEMO)
ENDS = DEMO.end_tokens

DEEP = Grammar(Kind.REGEX, ("x(a|b)*a(a|b){12}z|y[0-9]+",))
"""After an x, the lexer must track the last twelve letters; after a y its state stays small."""


def tokens(text: str) -> list[int]:
    return TOKENIZER.encode(text, special=False)


def exhaust(text: TextGrammar) -> None:
    """Drive a text of DEEP to the lexer's limit."""
    chance = random.Random(1)
    text.commit(tokens("x"))

    def go_on() -> None:
        while True:
            text.allowed([])
            text.commit(tokens(chance.choice("ab")))

    with pytest.raises(GrammarTooComplexError):
        go_on()


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> GrammarCompiler:
    """Return a compiler with a low lexer limit."""
    monkeypatch.setattr(module, "STEP_FUEL", 300)
    return GrammarCompiler.of(DEMO)


def test_a_spent_lexer_is_not_used_for_new_texts(limited: GrammarCompiler) -> None:
    assert limited.kept(DEEP) is None
    exhaust(limited.compile(DEEP).begin([], ENDS))
    assert limited.kept(DEEP) is None
    fresh = limited.compile(DEEP).begin([], ENDS)
    assert limited.kept(DEEP) is not None
    fresh.commit(tokens("y1"))
    assert fresh.allowed([]) is not None


def test_a_lexer_is_not_spent_by_another_owners_text(limited: GrammarCompiler) -> None:
    mine = limited.compile(DEEP, "me").begin(tokens("y"), ENDS)
    exhaust(limited.compile(DEEP, "another").begin([], ENDS))
    mine.commit(tokens("1"))
    assert mine.allowed([]) is not None
    assert limited.kept(DEEP, "me") is not None


def test_a_text_that_is_resumed_has_as_much_work_as_it_had(limited: GrammarCompiler) -> None:
    """The library limits the work between two masks; this limit does not apply to the replay of a whole text."""
    text = tokens("y" + "1234567890" * 20)
    step_by_step = limited.compile(DEEP, "a").begin([], ENDS)
    for token in text:
        step_by_step.commit([token])
        assert step_by_step.allowed([]) is not None
    limited.compile(DEEP, "b").begin(text, ENDS)


class Slow(GrammarCompiler):
    """Compiles DEEP only when `may` is set."""

    def __init__(self) -> None:
        super().__init__(DEMO.path / "tokenizer.json", DEMO.vocabulary)
        self.may = threading.Event()
        self.begun: list[Grammar] = []

    def _matcher(self, grammar: Grammar):  # type: ignore[no-untyped-def]  # the library's
        self.begun.append(grammar)
        if grammar is DEEP:
            assert self.may.wait(60)
        return super()._matcher(grammar)


def test_a_grammar_that_is_compiled_holds_up_no_other() -> None:
    """Grammars compile concurrently, each once for all callers."""
    compiler, other = Slow(), Grammar(Kind.REGEX, ("a+",))
    compiler.compile(other)
    waiting = [threading.Thread(target=compiler.compile, args=(DEEP,)) for _ in range(3)]
    for each in waiting:
        each.start()
    compiler.compile(other)
    compiler.compile(Grammar(Kind.REGEX, ("b+",)))
    compiler.may.set()
    for each in waiting:
        each.join(60)
    assert compiler.begun.count(DEEP) == 1
    assert compiler.kept(DEEP) is not None


def test_what_cannot_be_compiled_is_not_kept() -> None:
    compiler, wrong = Slow(), Grammar(Kind.REGEX, ("(",))
    for _ in range(2):
        with pytest.raises(GrammarError):
            compiler.compile(wrong)
    assert compiler.begun == [wrong, wrong]
    assert compiler.kept(wrong) is None


PAIR = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"const": 1}}}}
SPACED = '{\n  "a" :\t1,\n  "b": [1 , 1]\n}'
TIGHT = '{"a":1,"b":[1,1]}'
USUAL = '{"a": 1, "b": [1, 1]}'


@pytest.mark.parametrize(
    ("guidance", "fitting"),
    [
        ({}, [USUAL]),
        ({"whitespace_flexible": False}, [USUAL]),
        ({"whitespace_flexible": True}, [USUAL, TIGHT, SPACED]),
        ({"whitespace_pattern": " ?"}, [USUAL, TIGHT]),
        ({"whitespace_flexible": True, "key_separator": ": "}, [USUAL]),
    ],
    ids=json.dumps,
)
@pytest.mark.parametrize("is_rule", [False, True])
def test_the_white_space_that_a_schema_allows(guidance: dict[str, Any], fitting: list[str], is_rule: bool) -> None:
    schema = {**PAIR, "x-guidance": guidance}
    followed = Followed(Kind.LARK, json_rule("start", schema)) if is_rule else Followed.of_schema(schema)
    assert [text for text in (USUAL, TIGHT, SPACED) if followed.takes(text)] == fitting
