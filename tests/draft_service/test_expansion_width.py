"""How many nodes are read together, by what a step over them takes."""

from __future__ import annotations

import pytest

from draft_service.expansion_width import WIDTHS, measured, widest
from tests.draft_service.fakes import Engine


@pytest.mark.parametrize(("a_row", "width"), [(0.0, 16), (0.02, 16), (0.03, 8), (0.06, 8), (0.07, 4), (1.0, 4)])
def test_as_many_as_cost_hardly_more_than_four(a_row: float, width: int) -> None:
    """Each beyond four makes a step longer by such a part: by a quarter at most."""
    assert widest(lambda rows: 1.0 + a_row * (rows - 4)) == width


def test_it_is_measured_before_anybody_has_memory() -> None:
    engine = Engine()
    assert measured(engine, 5) in WIDTHS
    assert {len(tokens) for tokens in engine.read} == set(WIDTHS)
