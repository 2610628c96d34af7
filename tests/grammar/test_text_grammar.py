"""A text's grammar state depends on the text alone, not on queries about candidates."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.decoding.query import TokenMask
from specdec.engine.model_directory import ModelDirectory
from specdec.grammar.compiler import GrammarCompiler
from specdec.grammar.grammar import Grammar, GrammarError, Kind, source_violation
from specdec.grammar.text_grammar import TextGrammar
from specdec.text.tokenizer import Tokenizer

DEMO = ModelDirectory(Path(__file__).parent.parent.parent / "demo" / "target")
COMPILER = GrammarCompiler.of(DEMO)
TOKENIZER = Tokenizer(DEMO)
(END,) = DEMO.end_tokens
ENDS = frozenset({END})

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer"}, "ok": {"type": "boolean"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
LISTS = 'start: "[" (item (", " item)*)? "]"\nitem: /[a-z]{1,4}/ | start'
GRAMMARS = [
    Grammar(Kind.JSON_SCHEMA, (json.dumps(PERSON),)),
    Grammar(Kind.JSON_SCHEMA, ("{}",)),
    Grammar(Kind.REGEX, (r"[0-9]{3}-[a-z]+( de| für)*",)),
    Grammar(Kind.LARK, (LISTS,)),
    Grammar(Kind.LARK, ('start: few "."\nfew[max_tokens=3]: /[a-z ]+/',)),  # cannot be rolled back
    Grammar(Kind.CHOICE, ("yes", "yes, but", 'a "b"\n\\', "\x01")),
    Grammar(Kind.REGEX, ("[a-z]{4,9}",), after_token=77),
    Grammar(Kind.REGEX, ("[a-z]{4,9}",), after_token=77, opening_token=76),
]


def tokens_of(mask: TokenMask | None) -> list[int]:
    """Return the tokens in a mask; None allows all."""
    if mask is None:
        return list(range(DEMO.vocabulary))
    return np.flatnonzero(np.unpackbits(mask, count=DEMO.vocabulary, bitorder="little")).tolist()


def begun(grammar: Grammar, text: Sequence[int] = ()) -> TextGrammar:
    return COMPILER.compile(grammar).begin(text, ENDS)


def walk(grammar: Grammar, steps: int, chance: random.Random) -> list[int]:
    """Draw tokens, each allowed after the previous ones, up to the end token."""
    text: list[int] = []
    state = begun(grammar)
    while len(text) < steps and END not in text:
        text.append(chance.choice(tokens_of(state.allowed(text))))
    return text


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(GRAMMARS), st.integers(0, 2**32), st.data())
def test_masks_depend_on_the_text_alone(grammar: Grammar, seed: int, data: st.DataObject) -> None:
    """Paths are queried in any order, mixed with forbidden tokens, and parts of them are committed."""
    chance = random.Random(seed)
    state, committed = begun(grammar), list[int]()
    for _ in range(data.draw(st.integers(1, 4))):
        path = walk_on(state, data.draw(st.integers(0, 6)), chance)
        prefixes = [path[:length] for length in range(len(path) + 1)]
        for prefix in data.draw(st.permutations(prefixes)):
            stray = chance.randrange(DEMO.vocabulary)
            mask = state.allowed(prefix)
            assert state.permits(prefix, stray) == (stray in set(tokens_of(mask)))
            state.allowed([*prefix, stray])
            assert tokens_of(mask) == tokens_of(begun(grammar, committed + prefix).allowed([]))
        state.forced()
        final = path[: data.draw(st.integers(0, len(path)))]
        state.commit(final)
        committed += final
    assert state.error is None


def walk_on(state: TextGrammar, steps: int, chance: random.Random) -> list[int]:
    """Like `walk`, but continue the committed text, and leave out the end token."""
    path: list[int] = []
    while len(path) < steps and (choices := [t for t in tokens_of(state.allowed(path)) if t != END]):
        path.append(chance.choice(choices))
    return path


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_a_text_that_ends_is_what_the_schema_describes(seed: int) -> None:
    text = walk(GRAMMARS[0], 200, random.Random(seed))
    if text[-1] == END:
        found = json.loads(TOKENIZER.decode(text[:-1]))
        assert len(found["name"]) <= 5
        assert isinstance(found["age"], int)
        assert found.keys() <= PERSON["properties"].keys()


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(GRAMMARS), st.integers(0, 2**32), st.integers(0, 20))
def test_what_is_forced_is_permitted_and_leaves_no_other_text(grammar: Grammar, seed: int, steps: int) -> None:
    """Other tokens may spell the same bytes."""
    text = [token for token in walk(grammar, steps, random.Random(seed)) if token != END]
    state = begun(grammar, text)
    forced = state.forced()
    for at, token in enumerate(forced):
        assert state.permits(forced[:at], token)
    told = b"".join(TOKENIZER.piece(token) for token in forced if token != END)
    for token in tokens_of(state.allowed([])):
        piece = TOKENIZER.piece(token)
        if forced and token != END:
            assert piece.startswith(told) or told.startswith(piece)
        elif forced:
            assert forced == [END]


def test_the_end_is_allowed_where_the_grammar_may_end_and_nowhere_else() -> None:
    state = begun(Grammar(Kind.REGEX, ("ab*",)))
    assert END not in tokens_of(state.allowed([]))
    (a,) = TOKENIZER.encode("a", special=False)
    assert END in tokens_of(state.allowed([a]))
    assert state.permits([a], END)
    done = begun(Grammar(Kind.CHOICE, ("a",)), [a])
    assert tokens_of(done.allowed([])) == [END]
    assert done.forced() == [END]


def test_a_stop_token_that_is_text_is_allowed_where_the_text_may_hold_it_or_end() -> None:
    a, b = TOKENIZER.encode("a", special=False) + TOKENIZER.encode("b", special=False)
    state = COMPILER.compile(Grammar(Kind.REGEX, ("a+",))).begin([], frozenset({END, b}))
    assert not state.permits([], b)
    assert {END, b, a} <= set(tokens_of(state.allowed([a])))


@pytest.mark.parametrize("split", range(4))
def test_a_text_is_free_until_its_reasoning_ends(split: int) -> None:
    """The closing mark may be a candidate, or one of several tokens committed together."""
    marker, (a,) = 77, TOKENIZER.encode("a", special=False)
    grammar = Grammar(Kind.REGEX, ("aaa",), after_token=marker)
    reasoning = [5, 900, marker]
    state = begun(grammar)
    state.commit(reasoning[:split])
    path = reasoning[split:]
    if path:
        assert tokens_of(state.allowed([])) == [token for token in range(DEMO.vocabulary) if token not in ENDS]
        assert state.permits(path[:-1], 3)
        assert not state.permits(path[:-1], END)
        assert state.forced() == []
    assert tokens_of(state.allowed(path)) == tokens_of(begun(Grammar(Kind.REGEX, ("aaa",))).allowed([]))
    assert not state.permits(path, 3)
    state.commit([*path, a])
    assert tokens_of(state.allowed([])) == tokens_of(begun(Grammar(Kind.REGEX, ("aa",))).allowed([]))


@pytest.mark.parametrize("split", range(5))
def test_a_text_is_free_only_if_it_opens_its_reasoning(split: int) -> None:
    """Without the opening mark, the grammar applies from the first token. That token's mask also allows the mark."""
    opening, marker, (a,) = 76, 77, TOKENIZER.encode("a", special=False)
    grammar = Grammar(Kind.REGEX, ("aaa",), after_token=marker, opening_token=opening)
    three, two = (tokens_of(begun(Grammar(Kind.REGEX, (text,))).allowed([])) for text in ("aaa", "aa"))
    assert tokens_of(begun(grammar).allowed([])) == sorted({opening, *three})
    assert begun(grammar).permits([], opening)
    assert not begun(grammar).permits([], 3)
    assert begun(grammar).forced() == []

    reasoning = [opening, 5, opening, marker]
    state = begun(grammar)
    state.commit(reasoning[:split])
    path = reasoning[split:]
    if path:
        assert state.permits(path[:-1], path[-1])
        assert END not in tokens_of(state.allowed(path[:-1]))
    assert tokens_of(state.allowed(path)) == three
    state.commit([*path, a])
    assert tokens_of(state.allowed([])) == two

    silent = begun(grammar)
    assert tokens_of(silent.allowed([a])) == two
    assert not silent.permits([a], opening)
    silent.commit([a])
    assert tokens_of(silent.allowed([])) == two
    assert not silent.permits([], marker)


def test_who_is_prepared_reads_nothing_later(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_bytes((DEMO.path / file.name).read_bytes())
    compiler = GrammarCompiler(file, DEMO.vocabulary)
    compiler.prepare()
    file.unlink()
    assert compiler.compile(Grammar(Kind.REGEX, ("a",))).begin([], ENDS).allowed([]) is not None


def test_a_later_marker_is_text() -> None:
    marker, (a,) = 77, TOKENIZER.encode("a", special=False)
    state = begun(Grammar(Kind.REGEX, ("a+",), after_token=marker), [marker, a])
    assert not state.permits([], marker)


def test_a_text_that_leaves_its_grammar_is_told() -> None:
    with pytest.raises(GrammarError, match="at token 1"):
        begun(Grammar(Kind.CHOICE, ("a",)), [*TOKENIZER.encode("a", special=False), 5])


HOSTILE: dict[str, tuple[Kind, Any, str]] = {
    "no JSON": (Kind.JSON_SCHEMA, "{", "Expecting property name"),
    "deep JSON": (Kind.JSON_SCHEMA, "[" * 100_000, "recursion"),
    "no schema": (Kind.JSON_SCHEMA, {"type": "strin"}, "Invalid type: strin"),
    "nothing fits": (Kind.JSON_SCHEMA, {"type": "string", "minLength": 5, "maxLength": 3}, "Unsatisfiable"),
    "itself": (Kind.JSON_SCHEMA, {"$ref": "#"}, "matches no text"),
    "another's": (Kind.JSON_SCHEMA, {"$ref": "http://example.com/x.json"}, "not present in a registry"),
    "not built": (Kind.JSON_SCHEMA, {"type": "array", "uniqueItems": True}, "uniqueItems"),
    "exponential": (
        Kind.JSON_SCHEMA,
        {
            "allOf": [
                {"anyOf": [{"properties": {f"a{n}": {"type": kind}}} for kind in ("integer", "string")]}
                for n in range(20)
            ]
        },
        "too large",
    ),
    "open group": (Kind.REGEX, "(", "unclosed group"),
    "look-ahead": (Kind.REGEX, "(?=a)b", "look-around"),
    "no rule": (Kind.LARK, "start: foo", "unknown name"),
    "endless": (Kind.LARK, "start: start", "matches no text"),
}


@pytest.mark.parametrize(("kind", "source", "problem"), HOSTILE.values(), ids=HOSTILE.keys())
def test_what_cannot_be_used_is_told_in_a_line(kind: Kind, source: Any, problem: str) -> None:
    text = source if isinstance(source, str) else json.dumps(source)
    with pytest.raises(GrammarError, match=problem) as found:
        COMPILER.compile(Grammar(kind, (text,)))
    assert "\n" not in str(found.value)
    assert len(str(found.value)) < 200


@pytest.mark.parametrize(
    ("kind", "source", "problem"),
    [
        (Kind.REGEX, [""], "is empty"),
        (Kind.REGEX, ["a" * 131073], "has 131073 bytes, must have at most 131072"),
        (Kind.CHOICE, [], "has 0 texts, must have 1 to 1024"),
        (Kind.CHOICE, ["a"] * 1025, "has 1025 texts"),
        (Kind.CHOICE, ["a", ""], "has an empty text"),
        (Kind.CHOICE, ["a" * 70_000, "b" * 70_000], "has 140000 bytes"),
    ],
)
def test_sources_that_are_not_compiled(kind: Kind, source: list[str], problem: str) -> None:
    assert (source_violation(kind, source) or "").startswith(problem)


HARD = Grammar(Kind.LARK, ("start: a\na: a a a | a a | /[a-z ]/ | ",))
"""Compiles in a millisecond; the work per token grows with the text."""


def test_a_grammar_that_becomes_too_complex_is_given_up() -> None:
    """Whatever is queried about candidates, it is given up at the same position. Proposers get no error."""
    letters = [token for letter in "abcabcabcabcabcabc" for token in TOKENIZER.encode(letter, special=False)]
    places = []
    for look_ahead in (False, True):
        state = begun(HARD)
        for at, letter in enumerate(letters):
            if look_ahead:
                state.hint(letters[at : at + 6])
                state.permits(letters[at : at + 3], letters[0])
            try:
                state.allowed([])
            except GrammarError:
                places.append(at)
                break
            state.commit([letter])
        with pytest.raises(GrammarError, match="too complex for this text: "):
            state.allowed([])
        assert state.hint([]) is None
        assert state.forced() == []
    first, second = places
    assert first == second
