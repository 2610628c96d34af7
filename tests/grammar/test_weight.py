"""Compiled grammars are cached within memory budgets, per owner and in total, and the oldest are evicted."""

from __future__ import annotations

import gc
import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from specdec.engine.model_directory import ModelDirectory
from specdec.grammar.compiler import GrammarCompiler, GrammarRoomError
from specdec.grammar.grammar import Grammar, GrammarError, GrammarTooComplexError, Kind
from specdec.grammar.trial import allocated_bytes
from specdec.grammar.weight import MAX_STATES, MIN_STATES, growth_bytes, lexer_states

ROOT = Path(__file__).parent.parent.parent
DEMO = ModelDirectory(ROOT / "demo" / "target")
ENDS = DEMO.end_tokens
SMALL = [Grammar(Kind.REGEX, (f"a{{{n}}}",)) for n in range(10, 30)]
ONE = growth_bytes(SMALL[-1])  # bytes of the heaviest of these


def schema(source: object) -> Grammar:
    return Grammar(Kind.JSON_SCHEMA, (json.dumps(source),))


def limited(kept: float, owner: float) -> GrammarCompiler:
    """Return a compiler with room for `kept` grammars of SMALL, at most `owner` of them per owner."""
    return GrammarCompiler(
        DEMO.path / "tokenizer.json", DEMO.vocabulary, kept_bytes=int(kept * ONE), owner_bytes=int(owner * ONE)
    )


def kept(compiler: GrammarCompiler, owner: str = "") -> list[int]:
    return [n for n, grammar in enumerate(SMALL) if compiler.kept(grammar, owner) is not None]


def test_the_one_used_longest_ago_gives_way() -> None:
    compiler = limited(3, 3)
    for grammar in (SMALL[0], SMALL[1], SMALL[2], SMALL[0], SMALL[3]):
        compiler.compile(grammar)
    assert kept(compiler) == [0, 2, 3]
    assert compiler.bytes <= 3 * ONE


def test_an_owner_takes_no_room_of_others() -> None:
    compiler = limited(4, 2)
    compiler.compile(SMALL[0], "quiet")
    for grammar in SMALL:
        compiler.compile(grammar, "busy")
    assert kept(compiler, "quiet") == [0]
    assert kept(compiler, "busy") == [18, 19]


class Ended:
    """An ended session: its token tree has reference cycles, so it lives until garbage collection."""

    def __init__(self, compiler: GrammarCompiler, grammar: Grammar) -> None:
        self.grammar = compiler.compile(grammar)
        self.itself = self


def test_texts_that_have_ended_keep_no_room() -> None:
    compiler = limited(3, 3)
    gc.disable()
    try:
        for grammar in SMALL[:4]:
            Ended(compiler, grammar)
        assert kept(compiler) == [1, 2, 3]
        for grammar in SMALL[4:6]:
            Ended(compiler, grammar)
        with pytest.raises(GrammarRoomError):  # the next collection is not due yet
            compiler.compile(SMALL[6])
    finally:
        gc.enable()


def test_what_texts_use_stays_and_counts() -> None:
    compiler = limited(3, 2)
    used = [compiler.compile(grammar, "busy") for grammar in SMALL[:2]]
    with pytest.raises(GrammarRoomError) as refused:
        compiler.compile(SMALL[2], "busy")
    assert refused.value.of_owner
    compiler.compile(SMALL[3], "another")
    held = compiler.compile(SMALL[4], "another")
    with pytest.raises(GrammarRoomError) as refused:
        compiler.compile(SMALL[5], "third")
    assert not refused.value.of_owner
    text = used.pop().begin([], ENDS)
    with pytest.raises(GrammarRoomError):  # a text references the grammar, even if evicted
        compiler.compile(SMALL[2], "busy")
    del text, held, refused
    gc.collect()
    compiler.compile(SMALL[2], "busy")
    compiler.compile(SMALL[6], "third")


def test_a_grammar_that_is_too_heavy_is_refused() -> None:
    with pytest.raises(GrammarError, match=r"takes up to 19\d MiB compiled, must take at most 160"):
        GrammarCompiler.of(DEMO).compile(schema({}), weight=190 << 20)


def test_what_was_refused_takes_no_room() -> None:
    compiler = limited(1.5, 1)
    for _ in range(3):
        with pytest.raises(GrammarError):
            compiler.compile(Grammar(Kind.REGEX, ("(",)))
    assert compiler.bytes == 0


@pytest.mark.parametrize(
    ("grammar", "states"),
    [
        (Grammar(Kind.REGEX, ("abc",)), MIN_STATES + 3),
        (Grammar(Kind.REGEX, ("a{100}b{7,20}",)), MIN_STATES + 13 + 4 * 120),
        (Grammar(Kind.LARK, ('start: "a"{50}',)), MIN_STATES + 3 + 4 * 50),
        (Grammar(Kind.LARK, ('start: <[151657]> "2024" a ~ 30..70',)), MIN_STATES + 8 + 4 * 70),
        (Grammar(Kind.LARK, ('start: %json {"maxLength": 900}',)), MIN_STATES + 7 + 4 * 900),
        (Grammar(Kind.CHOICE, ("a100", "b")), MIN_STATES + 5),
        (schema({"maxLength": 300}), MIN_STATES + 4 + 4 * 300),
        (schema({"pattern": "a{30}"}), MIN_STATES + 5 + 4 * 30),
        (schema({"multipleOf": 99991}), MAX_STATES),
        (schema({"enum": [2024, 2025]}), MIN_STATES + 5),
        (schema({"multipleOf": "x"}), MAX_STATES),
        (schema({"properties": {"maxItems": {"type": "integer"}}}), MIN_STATES + 12),
        (Grammar(Kind.REGEX, ("a{" + "9" * 5000 + "}",)), MAX_STATES),
    ],
)
def test_a_source_says_how_many_states_its_lexer_may_need(grammar: Grammar, states: int) -> None:
    assert lexer_states(grammar) == states


GROWING = {
    "bounded string": schema({"type": "string", "maxLength": 500}),
    "digits": schema({"type": "integer", "multipleOf": 1999}),
    "classes": Grammar(Kind.REGEX, (r"(\w|\s)*\d(\w|\s){15}!",)),
    "any": Grammar(Kind.REGEX, (r"(.|\n)*a.{60}z",)),
    "intervals": Grammar(Kind.REGEX, ("[a-z]*a[a-z]{30}",)),
}


@pytest.mark.parametrize("grammar", GROWING.values(), ids=GROWING.keys())
def test_a_lexer_grows_to_no_more_than_it_is_charged(grammar: Grammar) -> None:
    """For any text, even one that reaches the limit."""
    compiler = GrammarCompiler.of(DEMO)
    compiler.compile(SMALL[0]).begin([], ENDS).allowed([])
    before = allocated_bytes()
    compiled = compiler.compile(grammar)
    weight = allocated_bytes() - before
    text, chance = compiled.begin([], ENDS), random.Random(1)
    for _ in range(1500):
        try:
            mask = text.allowed([])
        except GrammarTooComplexError:
            break
        assert mask is not None
        allowed = [t for t in np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist() if t not in ENDS]
        if not allowed:
            break
        text.commit([chance.choice(allowed)])
    assert allocated_bytes() - before < weight + growth_bytes(grammar)


SEVENTY = """
import sys
from pathlib import Path
from specdec.engine.model_directory import ModelDirectory
from specdec.grammar.compiler import GrammarCompiler
from specdec.grammar.grammar import Grammar, Kind
from specdec.grammar.trial import resident_bytes

directory = ModelDirectory(Path(sys.argv[1]))
file, limits = directory.path / "tokenizer.json", {"kept_bytes": 96 << 20, "owner_bytes": 48 << 20}
compiler = GrammarCompiler(file, directory.vocabulary, **limits)
compiler.compile(Grammar(Kind.REGEX, ("a",)))
before, most = resident_bytes(), 0
for number in range(5001, 5071):
    heavy = Grammar(Kind.JSON_SCHEMA, ('{"type": "integer", "multipleOf": %d}' % number,))
    compiler.compile(heavy, "ab"[number % 2], weight=4 << 20)
    most = max(most, resident_bytes())
print(most - before)
"""


def test_seventy_heavy_grammars_of_two_owners_stay_within_the_budget() -> None:
    """Each takes 3 MB when compiled, so the memory of evicted ones must really be freed."""
    command = [sys.executable, "-c", SEVENTY, str(DEMO.path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, timeout=120)
    assert int(done.stdout) < 96 << 20
