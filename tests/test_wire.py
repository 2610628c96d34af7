"""What is rounded on its way between services."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.serving.wire import SCORE_UNIT, paths_from, scores_from, scores_message
from specdec.v1 import model_pb2


@given(st.lists(st.floats(-1e30, 0.0)))
def test_a_score_takes_a_byte(scores: list[float]) -> None:
    message = scores_message(scores)
    assert len(message) == len(scores)
    for sent, received in zip(scores, scores_from(message), strict=True):
        assert -((255 * SCORE_UNIT) ** 2) <= received <= 0.0
        if sent > -7.0:
            assert abs(math.sqrt(-sent) - math.sqrt(-received)) <= SCORE_UNIT / 2 + 1e-9


@given(st.floats(-15.0, 0.0), st.floats(-15.0, 0.0))
def test_the_better_one_is_not_worse_on_arrival(one: float, other: float) -> None:
    received = scores_from(scores_message([min(one, other), max(one, other)]))
    assert received[0] <= received[1]


@pytest.mark.parametrize("rate", [0.9, 0.97, 0.99])
def test_long_paths_add_up(rate: float) -> None:
    """To within a tenth of what they lose."""
    assert sum(scores_from(scores_message([math.log(rate)] * 24))) == pytest.approx(24 * math.log(rate), rel=0.1)


@given(st.binary())
def test_whatever_arrives_is_scores(message: bytes) -> None:
    assert all(math.isfinite(score) and score <= 0 for score in scores_from(message))


def test_an_older_drafts_scores_are_read() -> None:
    message = model_pb2.Extend(base=3, tokens=[5, 6], parents=[0, 1], scores=[-0.5, -1.5])
    assert paths_from(message).logprobs == [-0.5, -1.5]
