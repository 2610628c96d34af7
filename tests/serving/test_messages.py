"""Rounding of values on the wire."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.decoding.contrastive import DraftQuery
from specdec.decoding.proposal import MAX_PARTIAL_IDS, DistributionSizes, DraftDistribution
from specdec.decoding.sampling import Rule
from specdec.serving.messages import (
    LOGPROB_UNIT,
    distribution_from,
    distribution_message,
    logprobs_from,
    logprobs_message,
    paths_from,
    query_from,
    query_message,
)
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
    """Their sum is within a tenth of the path logprob."""
    assert sum(logprobs_from(logprobs_message([math.log(rate)] * 24))) == pytest.approx(24 * math.log(rate), rel=0.1)


@given(st.binary())
def test_whatever_arrives_is_logprobs(message: bytes) -> None:
    assert all(math.isfinite(score) and score <= 0 for score in logprobs_from(message))


@pytest.mark.parametrize(
    ("rule", "ids", "gaps", "values", "kept"),
    [
        (Rule.COUPLED, 1, 0, 1, False),
        (Rule.COUPLED, 0, 1, 1, False),
        (Rule.REJECTION, 128, 0, 128, True),
        (Rule.REJECTION, 129, 0, 129, False),
        (Rule.REJECTION, 0, 0, 129, False),
        (Rule.REJECTION, 0, 1, 1, False),
        (Rule.CONTRASTIVE, 0, 0, 10_000, True),
        (Rule.CONTRASTIVE, 0, 0, 11_112, False),
        (Rule.CONTRASTIVE, 1, 0, 1, False),
        (Rule.CONTRASTIVE, 0, MAX_PARTIAL_IDS, MAX_PARTIAL_IDS, True),
        (Rule.CONTRASTIVE, 0, MAX_PARTIAL_IDS + 1, MAX_PARTIAL_IDS + 1, False),
        (Rule.CONTRASTIVE, 1, 1, 1, False),
    ],
)
def test_distributions_that_a_rule_cannot_use_are_left_out_unread(
    rule: Rule, ids: int, gaps: int, values: int, kept: bool
) -> None:
    """There may be many such distributions, and each may be as large as a message."""
    row = model_pb2.DraftDistribution(parent=0, ids=range(ids), id_gaps=[1] * gaps, values=bytes(2 * values))
    message = model_pb2.Extend(base=1, distributions=[row])
    assert bool(paths_from(message, DistributionSizes.of(rule, 10_000)).distributions) is kept


ascending = st.sets(st.integers(0, 200_000), min_size=1, max_size=300).map(sorted)


@given(ascending, st.booleans(), st.integers(0, 2**32 - 1))
def test_a_partial_distribution_and_a_query_travel(ids: list[int], answer: bool, base: int) -> None:
    tokens = np.array(ids)
    row = DraftDistribution(tokens, -np.arange(len(ids), dtype=np.float16), vocabulary=200_001, answer=answer)
    message = distribution_message(3, row)
    again = distribution_from(message, DistributionSizes.of(Rule.CONTRASTIVE, 200_001))
    assert again.ids is not None
    assert (again.ids.tolist(), again.values.tolist()) == (ids, row.values.tolist())
    assert (message.parent, again.vocabulary, again.answer) == (3, 200_001, answer)
    assert not again.contrast_violation(200_000)
    asked = query_from(query_message(DraftQuery(base, tokens)), 200_001)
    assert asked.ids is not None
    assert (asked.base, asked.ids.tolist()) == (base, ids)
    assert query_from(query_message(DraftQuery(base, None)), 200_001) == (base, None)


@pytest.mark.parametrize(
    ("gaps", "why"),
    [
        ([5, 0], "query.id_gaps: has a gap of 0 after the first; ids must ascend"),
        ([5, 995], "query.id_gaps: names token 1000, the vocabulary has 1000 tokens"),
        ([2**32 - 1] * 2, "query.id_gaps: names token 8589934590"),
        (
            [1] * (MAX_PARTIAL_IDS + 1),
            f"query.id_gaps: has {MAX_PARTIAL_IDS + 1} ids, must have at most {MAX_PARTIAL_IDS}",
        ),
    ],
)
def test_a_query_that_makes_no_sense_is_refused(gaps: list[int], why: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(why)}"):
        query_from(model_pb2.DraftQuery(base=3, id_gaps=gaps), 1000)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"vocabulary_size": 0}, "it is over a vocabulary of 0 tokens, the target's has 1000"),
        ({"vocabulary_size": 2000}, "it is over a vocabulary of 2000 tokens"),
        ({"id_gaps": [5, 994]}, "it has token 999, its vocabulary has 990 tokens"),
        ({"values": np.array([-1.0, 0.5], "<f2").tobytes()}, "it has a log-probability of 0.5, must be at most 0"),
        ({"id_gaps": [], "ids": [5, 9]}, "it has `ids`, which are for REJECTION"),
    ],
)
def test_a_partial_distribution_that_makes_no_sense_is_refused(fields: dict[str, Any], why: str) -> None:
    usual: dict[str, Any] = {
        "id_gaps": [5, 4],
        "values": np.array([-1.0, -2.0], "<f2").tobytes(),
        "vocabulary_size": 990,
    }
    row = distribution_from(model_pb2.DraftDistribution(**usual | fields), DistributionSizes(2, 2, 2))
    problem = row.contrast_violation(1000 if "ids" not in fields else 2)
    assert problem.startswith(why)
    assert not row.fits(Rule.CONTRASTIVE, 1000)
