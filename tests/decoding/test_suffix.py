"""Continuations equal those of brute force, which compares every position token by token."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from specdec.decoding.ngrams import MAX_MATCH, RECENT, Continuation, continuations

texts = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def array(tokens: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.asarray(tokens, dtype=np.int32)


def agreement(written: list[int], place: int, end: list[int]) -> int:
    """Return how many tokens up to and including `place` agree with the end."""
    match = 0
    while match < min(place + 1, len(end), MAX_MATCH) and written[place - match] == end[-1 - match]:
        match += 1
    return match


def plainly(written: list[int], end: list[int], most: int, depth: int) -> list[tuple[list[int], int]]:
    places = [(agreement(written, place, end), place) for place in range(len(written) - 1)]
    found: dict[int, tuple[list[int], int]] = {}
    for match, place in sorted(places, reverse=True):
        tokens = list(itertools.takewhile(lambda token: token >= 0, written[place + 1 : place + 1 + depth]))
        if match and tokens:
            found.setdefault(tokens[0], (tokens, match))
    return list(found.values())[:most]


def told(found: list[Continuation]) -> list[tuple[list[int], int]]:
    return [(continuation.tokens.tolist(), continuation.match) for continuation in found]


@given(texts, st.integers(1, 4), st.integers(1, 8))
def test_the_end_of_a_text_in_itself(text: list[int], most: int, depth: int) -> None:
    """Few enough positions agree for all of them to be examined."""
    if max(map(text.count, text)) <= RECENT:
        assert told(continuations(array(text), array(text), most, depth)) == plainly(text, text, most, depth)


@given(st.lists(st.integers(-1, 3), min_size=1, max_size=60), texts, st.integers(1, 4), st.integers(1, 8))
def test_in_what_others_wrote(written: list[int], text: list[int], most: int, depth: int) -> None:
    if max(map(written.count, written)) <= RECENT:
        assert told(continuations(array(written), array(text), most, depth)) == plainly(written, text, most, depth)


def test_the_longest_agreement_comes_first_and_the_latest_among_equals() -> None:
    text = [1, 2, 3, 7, 2, 3, 8, 2, 3, 9, 1, 2, 3]
    assert told(continuations(array(text), array(text), 3, 2)) == [([7, 2], 3), ([9, 1], 2), ([8, 2], 2)]


def test_agreement_is_counted_up_to_a_limit() -> None:
    text = [5] * (3 * MAX_MATCH)
    ((tokens, match),) = told(continuations(array(text), array(text), 3, 4))
    assert (tokens, match) == ([5], MAX_MATCH)


def test_nothing_follows_what_was_never_written() -> None:
    assert continuations(array([1, 2, 3]), array([1, 2, 3]), 3, 8) == []
    assert continuations(array([4]), array([4]), 3, 8) == []
