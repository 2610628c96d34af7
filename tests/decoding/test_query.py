"""The sampling query: the tokens that banned sequences rule out, against a plain search of the text's end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from specdec.decoding.query import BannedSequences, RequestSampler
from specdec.decoding.sampling import Sampling

TEXTS = st.lists(st.integers(0, 3), max_size=8)
SEQUENCES = st.frozensets(st.lists(st.integers(0, 3), min_size=2, max_size=5).map(tuple), min_size=1, max_size=12)


@given(SEQUENCES, TEXTS, TEXTS)
def test_the_tokens_that_would_complete_one(
    sequences: frozenset[tuple[int, ...]], text: list[int], path: list[int]
) -> None:
    whole = text + path
    want = {last for *before, last in sequences if whole[len(whole) - len(before) :] == before}
    assert set(BannedSequences(sequences).ruled_out(text, path)) == want


def test_a_request_without_any() -> None:
    assert RequestSampler(Sampling()).ruled_out([1], [2]) == ()
    assert RequestSampler(Sampling(banned_sequences=frozenset({(1, 2, 3)}))).ruled_out([1], [2]) == [3]


def test_a_smaller_vocabulary_has_none_with_other_tokens() -> None:
    sampling = Sampling(banned_sequences=frozenset({(1, 9), (9, 1), (1, 2)}))
    assert sampling.within(9).banned_sequences == {(1, 2)}
