"""The shape of a window of any size at each step, under a target that chooses the position of each token.

`tests/verifier_service/test_ngram_proposer.py` compares a session's window and pool with the paper's algorithm.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.decoding.lookahead import Lookahead, Window

sizes = st.builds(Lookahead, st.integers(2, 9), st.integers(2, 6), st.just(3))


class Positions:
    """A target that chooses, at each position, that position's number."""

    def __init__(self, size: Lookahead) -> None:
        self.tip = 100
        self.size = size
        self.window = Window(size, range(self.tip + 1, self.tip + size.window + size.ngram))

    def step(self) -> list[list[int]]:
        first_level, columns = self.window.levels[0], self.window.columns
        lasts = [column[-1] for column in columns] if columns else [self.tip, *first_level]
        ngrams = self.window.advance(self.tip, [last + 1 for last in lasts])
        self.tip += 1
        return ngrams


@given(sizes)
def test_every_token_stands_where_the_paper_has_it(size: Lookahead) -> None:
    target = Positions(size)
    for _ in range(3 * size.ngram):
        first_level, *levels = target.window.levels
        assert first_level == [target.tip + 1 + i for i in range(len(first_level))]
        for number, level in enumerate(levels, 1):
            assert level == [target.tip + number + i for i in range(len(first_level) + 1)]
        assert sum(map(len, target.window.levels)) <= size.most_rows
        target.step()


@given(sizes)
def test_it_is_full_after_a_step_for_each_level(size: Lookahead) -> None:
    target = Positions(size)
    for _ in range(size.ngram - 2):
        assert not target.window.full
        assert target.step() == []
    assert target.window.full
    assert sum(map(len, target.window.levels)) == size.rows
    ngrams = target.step()
    if size.ngram > 2:  # a Jacobi window is verified itself
        assert ngrams == [[target.tip - 1 + i + j for j in range(size.ngram)] for i in range(size.window)]


@pytest.mark.parametrize("committed", [1, 3, 5])
def test_a_jacobi_window_moves_on_by_what_was_committed(committed: int) -> None:
    window = Window(Lookahead(6, 2, 1), [50] * 5)
    window.advance(100, [101, 102, 103, 104, 105, 106], committed)
    known = list(range(101 + committed, 107))
    assert window.levels == [known + [106] * (5 - len(known))]
