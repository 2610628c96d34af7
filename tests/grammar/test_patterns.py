"""Expressions of JSON Schema keep their meaning when they are rewritten, and look-around disappears."""

from __future__ import annotations

import contextlib
import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.grammar.languages import Languages
from specdec.grammar.patterns import (
    MAX_GROUPS,
    PatternError,
    PatternTooLargeError,
    UnreadableError,
    complement,
    union,
)

PLAIN = st.sampled_from(["a", "b", ".", "[ab]", "[^a]", "ab", "a|b", "c", "", r"\d", r"\."])
SUFFIXES = st.sampled_from(["", "*", "+", "?", "{2}", "{1,2}", "{2,}", "*?"])
GROUPS = st.recursive(
    PLAIN,
    lambda inner: st.one_of(
        st.builds("(?:{}){}".format, inner, SUFFIXES),
        st.builds("{}{}".format, inner, inner),
        st.builds("(?:{}|{})".format, inner, inner),
    ),
    max_leaves=4,
)
AHEAD = st.builds("(?{}{}{})".format, st.sampled_from("=!"), GROUPS, st.sampled_from(["", "$"]))
PATTERNS = st.one_of(
    st.builds("{}{}{}".format, st.sampled_from(["", "^"]), GROUPS, st.sampled_from(["", "$"])),
    st.builds("{}{}{}{}".format, st.sampled_from(["", "^"]), AHEAD, GROUPS, st.sampled_from(["", "$"])),
    st.builds("^{}{}(?:{})$".format, GROUPS, AHEAD, GROUPS),
    st.builds("(?:^|b)(?:{})(?:c|$)".format, GROUPS),
    st.builds("^(?:(?!{})[ab.])*$".format, st.sampled_from(["ab", "a", "b[ab]", "aa|bb", "a$"])),
)
TEXTS = st.text(alphabet="abc.1\n", max_size=6)


def in_rust(pattern: str) -> re.Pattern[str]:
    """Compile a rewritten expression; its syntax means the same in Rust and in Python."""
    return re.compile(pattern)


@given(PATTERNS, st.lists(TEXTS, max_size=20))
def test_a_rewritten_expression_matches_the_same_strings(pattern: str, texts: list[str]) -> None:
    languages = Languages()
    try:
        found = languages.of_pattern(pattern)
        rewritten = [in_rust(text) for text in languages.patterns(found)]
        alone = in_rust(languages.pattern(found))
    except PatternTooLargeError:
        return
    for text in [*texts, "", "a", "ab", "b"]:
        wanted = re.search(pattern.replace("$", r"\Z"), text) is not None
        assert languages.has(found, text) == wanted, text
        assert all(part.fullmatch(text) for part in rewritten) == wanted, text
        assert (alone.fullmatch(text) is not None) == wanted, text
        assert languages.has(languages.complement(found), text) != wanted, text


@given(PATTERNS)
def test_a_rewritten_expression_asserts_nothing_but_its_ends(pattern: str) -> None:
    languages = Languages()
    try:
        rewritten = languages.patterns(languages.of_pattern(pattern))
    except PatternTooLargeError:
        return
    for text in rewritten:
        assert text.startswith("^(?:")
        assert text.endswith(")$")
        assert not set(re.sub(r"\[\^", "[", text[4:-2])) & set("^$"), text
        assert "(?=" not in text
        assert "(?!" not in text


EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"


@pytest.mark.parametrize(
    ("pattern", "matched", "others"),
    [
        (EMAIL, ["a.b@c.de"], [".a@b.de", "a..b@c.de", "a@b"]),
        (r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$", ["1", "-.5", "007"], ["", "-", ".", "1..2"]),
        (r"^(?=.*[a-z])(?=.*\d).{4,}$", ["ab12", "1aaa"], ["abcd", "1234", "a1"]),
        (r"^((?!bad).)*$", ["", "ba"], ["bad", "abadb"]),
        (r"^\/\_\-\<\cA[\b&&]$", ["/_-<\x01\x08", "/_-<\x01&"], ["/_-<\x01"]),
        (r"^[[a]$", ["[", "a"], ["b"]),
        (r"^\u0041\x42(?<name>C)$", ["ABC"], ["AB"]),
        (r"^.$", ["a", "\U0001f600"], ["\r", "\u2028"]),
        (r"^[\u0000-\ud7ff\ue000-\u{10ffff}]+$", ["a", "\r\U0001f600"], [""]),
    ],
)
def test_what_is_found_in_the_wild(pattern: str, matched: list[str], others: list[str]) -> None:
    languages = Languages()
    rewritten = [in_rust(text) for text in languages.patterns(languages.of_pattern(pattern))]
    for text in matched:
        assert all(part.fullmatch(text) for part in rewritten), text
    for text in others:
        assert not all(part.fullmatch(text) for part in rewritten), text


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        ("(?<=a)b", "uses look-behind"),
        (r"(a)\1", "refers back to a group"),
        (r"\bword\b", "word boundary"),
        ("a?^b", r"has a \^ behind something that may be empty"),
        ("(?:(?=a)b|c)*", "repeats a group with look-around"),
        ("^(?!(a|b)*a(a|b){12}$)", "too large an automaton"),
    ],
)
def test_what_has_no_equivalent(pattern: str, problem: str) -> None:
    languages = Languages()
    with pytest.raises(PatternError, match=problem):
        languages.patterns(languages.of_pattern(pattern))


@pytest.mark.parametrize(
    "pattern",
    [r"\p{L}", "(?i)a", "[a", "(a", "a)", "*a", "a{2,1}", "a{1,1000000}", r"[b-a]", r"[+-\d]", "\\", r"\A", "(" * 1000],
)
def test_what_is_not_read_is_left_to_the_library(pattern: str) -> None:
    with pytest.raises(UnreadableError):
        Languages().of_pattern(pattern)


@pytest.mark.parametrize(
    "pattern",
    ["a?" * 5000, "(a|b)" * 20_000, "(?:" * MAX_GROUPS + ")" * MAX_GROUPS, "[" + "ab" * 10_000 + "]", "(?!a)" * 5000],
)
def test_large_expressions_end_in_time(pattern: str) -> None:
    languages = Languages()
    with contextlib.suppress(PatternError, UnreadableError):
        languages.patterns(languages.of_pattern(pattern))


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 5))))
def test_sets_of_characters(pairs: list[tuple[int, int]]) -> None:
    ranges = union((low, low + more) for low, more in pairs)
    members = {code for low, high in ranges for code in range(low, high + 1)}
    assert members == {code for low, more in pairs for code in range(low, low + more + 1)}
    assert complement(complement(ranges)) == ranges
    assert all(first[1] + 1 < second[0] for first, second in itertools.pairwise(ranges))
