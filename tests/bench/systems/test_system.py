"""Figures derived from a system's answer to a load."""

from __future__ import annotations

import pytest

from bench.systems.system import Answer, Load, NotServingError


def test_an_answer_knows_its_latencies() -> None:
    answer = Answer(1.0, [[(0.25, 1), (0.5, 2)], [(0.125, 3)]])
    assert (answer.tokens, answer.first, answer.pauses) == (6, [0.25, 0.125], [0.25])


def test_an_answer_that_is_too_short_is_none() -> None:
    answer = Answer(1.0, [[(0.25, 1), (0.5, 2)]])
    assert answer.checked("it", Load([[5]], 3, 0.0)) is answer
    with pytest.raises(NotServingError, match="it gave 3 tokens instead of 4"):
        answer.checked("it", Load([[5]], 4, 0.0))
