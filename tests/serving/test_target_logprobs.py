"""The target's log-probabilities for a draft: what is sent arrives, takes few bytes, and is refused if not sound."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from specdec.decoding.logprobs import logprobs
from specdec.serving.target_logprobs import MAX_TOP, PLACE_BYTES, PackedPlaces, TargetLogprobs, places_of
from specdec.v2 import model_pb2

VOCABULARY = 151_936
"""Qwen2.5's vocabulary, the largest of the tested models."""


def place(position: int, seed: int = 0, vocabulary: int = VOCABULARY, top: int = MAX_TOP) -> TargetLogprobs:
    logits = np.random.default_rng(seed).normal(scale=3.0, size=(1, vocabulary)).astype(np.float32)
    (found,) = logprobs(logits, np.array([0]), [top])
    return TargetLogprobs.of(position, found)


@given(vocabulary=st.integers(1, 300), top=st.integers(1, MAX_TOP), seed=st.integers(0, 1000))
def test_what_is_sent_arrives(vocabulary: int, top: int, seed: int) -> None:
    sent = [place(position, seed + position, vocabulary, top) for position in (3, 4, 9)]
    found = places_of([one.message for one in sent], 3, 10, vocabulary)
    assert [one.position for one in found] == [3, 4, 9]
    for one, other in zip(sent, found, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.logprobs.tolist() == other.logprobs.tolist()
        assert len(one.tokens) == min(top, vocabulary)


def test_a_place_takes_few_bytes() -> None:
    """On the wire, 5 for each token and 12 for the place; in memory, 388."""
    found = place(MAX_POSITION := 2**20, seed=1)
    committed = model_pb2.Committed(base=MAX_POSITION, tokens=[1], overruled=[found.message])
    without = model_pb2.Committed(base=MAX_POSITION, tokens=[1])
    assert committed.ByteSize() - without.ByteSize() <= 5 * MAX_TOP + 14
    assert without.ByteSize() == model_pb2.Committed.FromString(without.SerializeToString()).ByteSize() <= 8
    packed = PackedPlaces.of([found])
    assert sum(part.nbytes for part in (packed.positions, packed.tokens, packed.logprobs)) == PLACE_BYTES == 388


def test_ruled_out_tokens_are_left_out() -> None:
    logits = np.full((1, 100), -np.inf, dtype=np.float32)
    logits[0, :3] = 1.0
    (found,) = logprobs(logits, np.array([0]), [MAX_TOP])
    assert TargetLogprobs.of(0, found).tokens.tolist() == [0, 1, 2]


def message(position: int = 5, tokens: Any = (7, 8), logprobs: Any = (-0.5, -1.5)) -> model_pb2.TargetLogprobs:
    stored = logprobs if isinstance(logprobs, bytes) else np.asarray(logprobs, dtype="<f2").tobytes()
    return model_pb2.TargetLogprobs(position=position, tokens=tokens, logprobs=stored)


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([message(4)], "has position 4, must be from 5 to 7"),
        ([message(8)], "has position 8, must be from 5 to 7"),
        ([message(6), message(6)], "has position 6, must be from 7 to 7, ascending"),
        ([message(5), message(6), message(7), message(7)], "has 4 places, must have at most 3"),
        ([message(tokens=[], logprobs=b"")], "has 0 tokens and 0 bytes"),
        ([message(tokens=range(65), logprobs=[-9.0] * 65)], "has 65 tokens and 130 bytes, must have 1 to 64"),
        ([message(logprobs=b"\0\0\0")], "has 2 tokens and 3 bytes"),
        ([message(tokens=[7, 100])], "must have distinct token ids below 100, the highest is 100"),
        ([message(tokens=[7, 2**32 - 1])], "must have distinct token ids below 100"),
        ([message(tokens=[7, 7])], "must have distinct token ids below 100, the highest is 7"),
        ([message(logprobs=[math.nan, -1.0])], "not finite"),
        ([message(logprobs=[-1.0, -math.inf])], "not finite"),
        ([message(logprobs=[math.inf, -1.0])], "not finite"),
        ([message(logprobs=[-2.0, -1.0])], "or rise"),
        ([message(logprobs=[0.5, -1.0])], "sum to more than 1.01"),
        ([message(logprobs=[-0.1, -0.1])], "sum to more than 1.01"),
        ([message(logprobs=[60_000.0, 60_000.0])], "sum to more than 1.01"),
    ],
)
def test_what_is_not_sound_is_refused(messages: list[model_pb2.TargetLogprobs], problem: str) -> None:
    assert len(places_of([message()], 5, 8, 100)) == 1
    with pytest.raises(ValueError, match=problem):
        places_of(messages, 5, 8, 100)


ANYTHING = st.builds(
    message,
    st.integers(0, 2**32 - 1) | st.integers(4, 9),
    st.lists(st.integers(0, 2**32 - 1) | st.integers(0, 99), max_size=70),
    st.binary(max_size=140),
)
NEARLY_SOUND = st.integers(1, 4).flatmap(
    lambda count: st.builds(
        message,
        st.integers(4, 8),
        st.lists(st.integers(0, 100), min_size=count, max_size=count, unique=True),
        st.lists(st.floats(-20.0, 0.0), min_size=count, max_size=count).map(lambda found: sorted(found, reverse=True)),
    )
)


@given(st.lists(ANYTHING, max_size=4) | st.lists(NEARLY_SOUND, min_size=1, max_size=2))
@example([message(5), message(7)])
def test_any_bytes_are_refused_or_sound(messages: list[model_pb2.TargetLogprobs]) -> None:
    try:
        found = places_of(messages, 5, 8, 100)
    except ValueError:
        return
    assert len(found) == len(messages)
    for one in found:
        assert 5 <= one.position < 8
        assert max(one.tokens) < 100
        assert sum(math.exp(value) for value in one.logprobs.tolist()) <= 1.02


@given(st.lists(st.integers(0, 50), unique=True, max_size=12), st.integers(0, 55), st.integers(0, 13))
def test_packed_places_are_cut_as_texts_are(positions: list[int], cut: int, most: int) -> None:
    positions.sort()
    places = [place(position, position, vocabulary=90, top=1 + position % 5) for position in positions]
    packed = PackedPlaces.of(places).after(cut).last(most)
    kept = [one for one in places if one.position >= cut]
    kept = kept[max(0, len(kept) - most) :]
    assert list(packed.messages) == [one._replace(position=one.position - cut).message for one in kept]
