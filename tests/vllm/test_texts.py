"""Texts are identified by their tokens, independently of rows in vLLM's batch."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from specdec.decoding.tree import Paths
from specdec.vllm.texts import IN_VAIN, MIN_PATH_PROBABILITY, TextTable, Tokens, VllmText

VOCABULARY, CONTEXT, END = 50, 64, frozenset({1})


def row(*tokens: int) -> Tokens:
    return np.asarray(tokens, dtype=np.int32)


def table() -> TextTable:
    return TextTable(VOCABULARY, CONTEXT, END)


def chain(*tokens: int, probability: float = 0.9) -> Paths:
    return Paths(tokens, range(len(tokens)), [math.log(probability)] * len(tokens))


@given(st.lists(st.permutations(range(4)), min_size=1, max_size=8), st.data())
def test_a_text_is_found_in_whatever_row_it_is(orders: list[list[int]], data: st.DataObject) -> None:
    texts = {number: [9, 9, 20 + number] for number in range(4)}
    found: dict[int, VllmText] = {}
    ours = table()
    for step, order in enumerate(orders):
        present = [number for number in order if data.draw(st.booleans())]
        rows = {place: row(*texts[number]) for place, number in enumerate(present)}
        there = ours.find(rows, step)
        for place, number in enumerate(present):
            assert found.setdefault(number, there[place]) is there[place]
            there[place].extend_to(rows[place])
            texts[number] = [*texts[number], 10 + step, 10 + step]
    assert len(set(map(id, found.values()))) == len(found)


def test_two_equal_texts_are_two() -> None:
    ours = table()
    rows = {0: row(5, 6), 1: row(5, 6)}
    before = ours.find(rows, 1)
    assert before[0] is not before[1]
    after = ours.find(rows, 2)
    assert after == before


def test_another_text_in_the_same_row_is_a_new_one() -> None:
    ours = table()
    old = ours.find({0: row(5, 6, 7)}, 1)[0]
    new = ours.find({0: row(5, 6, 8, 9)}, 2)[0]
    assert new is not old
    assert new.tree.committed == [5, 6, 8, 9]
    assert ours.forget(2) == [old]
    assert ours.find({0: row(5, 6, 7, 7)}, 3)[0] is not old


def test_a_text_that_has_ended_is_dropped_once_it_has_no_row() -> None:
    """Otherwise each new text would be compared with all that ended in the last steps."""
    ours = table()
    old = ours.find({0: row(5, 6)}, 1)[0]
    old.extend_to(row(5, 6, 1))
    assert ours.find({1: row(5, 6, 1, 7)}, 2)[1] is not old
    assert ours.forget(0) == [old]
    assert ours.forget(0) == []


def test_a_text_goes_on_after_an_end_token_in_its_row() -> None:
    """As a request may ignore end tokens."""
    ours = table()
    text = ours.find({0: row(5, 6)}, 1)[0]
    text.extend_to(row(5, 6, 1))
    assert ours.find({0: row(5, 6, 1, 7)}, 2)[0] is text
    assert ours.forget(0) == []


def test_what_a_text_says_since_is_committed() -> None:
    text = VllmText(row(5, 6), VOCABULARY, CONTEXT, END)
    text.insert(2, chain(7, 8, 9, 10))
    assert text.extend_to(row(5, 6)) == []
    assert text.extend_to(row(5, 6, 7, 8)) == [7, 8]
    assert text.chain(8) == [9, 10]
    text.insert(2, chain(7, 8, 9, 10, 11))  # late, for an older base
    assert text.chain(8) == [9, 10, 11]
    assert text.chain(2) == [9, 10]
    assert text.extend_to(row(5, 6, 7, 8, 20)) == [20]
    assert text.chain(8) == []


def test_candidates_that_are_hardly_reached_are_left_out() -> None:
    text = VllmText(row(5), VOCABULARY, CONTEXT, END)
    text.insert(1, chain(*range(10, 20), probability=0.5))
    reached = math.floor(math.log(MIN_PATH_PROBABILITY, 0.5))
    assert text.chain(10) == list(range(10, 10 + reached))


def test_nothing_follows_the_end() -> None:
    text = VllmText(row(5), VOCABULARY, CONTEXT, END)
    text.insert(1, chain(6, 1, 7))
    assert text.chain(8) == [6, 1]
    full = VllmText(row(*[5] * (CONTEXT - 1)), VOCABULARY, CONTEXT, END)
    full.insert(CONTEXT - 1, chain(6, 7))
    assert full.chain(8) == [6]


def test_a_draft_that_is_late_is_not_waited_for_until_it_sends_something() -> None:
    text = VllmText(row(5), VOCABULARY, CONTEXT, END)
    assert not text.worth_a_wait  # nothing has come yet
    text.insert(1, chain(6))
    assert not text.worth_a_wait  # candidates are there already
    text.extend_to(row(5, 6))
    for _ in range(IN_VAIN):
        assert text.worth_a_wait
        text.waited_in_vain()
    assert not text.worth_a_wait
    text.insert(2, chain(7))
    text.extend_to(row(5, 6, 7))
    assert text.worth_a_wait
    text.lost()
    assert not text.worth_a_wait


def test_a_text_that_is_over_is_not_waited_for() -> None:
    text = VllmText(row(5), VOCABULARY, CONTEXT, END)
    text.insert(1, chain(6))
    text.extend_to(row(5, 1))
    assert not text.worth_a_wait
