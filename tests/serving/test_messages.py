"""Rounding of values on the wire."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.decoding.proposal import distribution_sizes
from specdec.decoding.sampling import Rule
from specdec.serving.messages import LOGPROB_UNIT, logprobs_from, logprobs_message, paths_from
from specdec.v2 import model_pb2


@given(st.lists(st.floats(-1e30, 0.0)))
def test_a_logprob_takes_a_byte(scores: list[float]) -> None:
    message = logprobs_message(scores)
    assert len(message) == len(scores)
    for sent, received in zip(scores, logprobs_from(message), strict=True):
        assert -((255 * LOGPROB_UNIT) ** 2) <= received <= 0.0
        if sent > -7.0:
            assert abs(math.sqrt(-sent) - math.sqrt(-received)) <= LOGPROB_UNIT / 2 + 1e-9


@given(st.floats(-15.0, 0.0), st.floats(-15.0, 0.0))
def test_the_better_one_is_not_worse_on_arrival(one: float, other: float) -> None:
    received = logprobs_from(logprobs_message([min(one, other), max(one, other)]))
    assert received[0] <= received[1]


@pytest.mark.parametrize("rate", [0.9, 0.97, 0.99])
def test_long_paths_add_up(rate: float) -> None:
    """Within a tenth of the path logprob."""
    assert sum(logprobs_from(logprobs_message([math.log(rate)] * 24))) == pytest.approx(24 * math.log(rate), rel=0.1)


@given(st.binary())
def test_whatever_arrives_is_logprobs(message: bytes) -> None:
    assert all(math.isfinite(score) and score <= 0 for score in logprobs_from(message))


@pytest.mark.parametrize(
    ("rule", "ids", "values", "kept"),
    [
        (Rule.COUPLED, 1, 1, False),
        (Rule.REJECTION, 128, 128, True),
        (Rule.REJECTION, 129, 129, False),
        (Rule.REJECTION, 0, 129, False),
        (Rule.CONTRASTIVE, 0, 1000, True),
        (Rule.CONTRASTIVE, 0, 1112, False),
        (Rule.CONTRASTIVE, 1, 1, False),
    ],
)
def test_distributions_that_a_rule_cannot_use_are_left_out_unread(
    rule: Rule, ids: int, values: int, kept: bool
) -> None:
    """Such distributions may be numerous, and as large as a message."""
    row = model_pb2.DraftDistribution(parent=0, ids=range(ids), values=bytes(2 * values))
    message = model_pb2.Extend(base=1, distributions=[row])
    assert bool(paths_from(message, *distribution_sizes(rule, 1000)).distributions) is kept
