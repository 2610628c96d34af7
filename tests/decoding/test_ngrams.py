"""The n-gram pool against linear search in lists."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from specdec.decoding import ngrams
from specdec.decoding.ngrams import NgramPool


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3))), st.integers(1, 4))
def test_the_latest_of_each_first_token_are_kept(added: list[tuple[int, int, int]], guesses: int) -> None:
    pool = NgramPool(guesses)
    for ngram in added:
        pool.add(ngram)
    for first in range(4):
        latest = [rest for key, *rest in reversed(added) if key == first]
        distinct = [rest for index, rest in enumerate(latest) if rest not in latest[:index]]
        assert [list(rest) for rest in pool.after(first)] == distinct[:guesses]


def test_the_token_that_was_longest_untouched_is_forgotten() -> None:
    pool = NgramPool(2)
    for first in range(ngrams.MAX_KEYS):
        pool.add((first, 1))
    pool.add((0, 2))
    pool.add((ngrams.MAX_KEYS, 1))
    assert pool.after(0) == [(2,), (1,)]
    assert pool.after(1) == []
    assert pool.after(2) == [(1,)]
