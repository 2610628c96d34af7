"""The expansion width, chosen by step latency."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from draft_service.expansion_width import ROWS, WIDTHS, measured, most, widest
from specdec.engine.batch import PackedBatch
from tests.draft_service.fakes import Engine


@pytest.mark.parametrize(("a_row", "width"), [(0.0, 16), (0.02, 16), (0.03, 8), (0.06, 8), (0.07, 4), (1.0, 4)])
def test_as_many_as_cost_hardly_more_than_four(a_row: float, width: int) -> None:
    """Each row beyond four lengthens a step by a constant fraction; all together may lengthen it by a quarter."""
    assert widest(lambda rows: 1.0 + a_row * (rows - 4)) == width


@pytest.mark.parametrize(
    ("a_row", "room", "rows"),
    [(0.0, 1000, 256), (0.0, 100, 64), (0.0, 10, 16), (0.015, 1000, 64), (0.03, 1000, 32), (0.04, 1000, 16)],
)
def test_as_many_of_all_as_take_twice_as_long_as_four(a_row: float, room: int, rows: int) -> None:
    tried = []

    def seconds(count: int) -> float:
        tried.append(count)
        return 1.0 + a_row * (count - 4)

    assert most(seconds, 1.0, room) == rows
    assert tried == [count for count in ROWS[1:] if count <= min(room, 2 * rows)]  # stops at the first one too long


def test_it_is_measured_before_anybody_has_memory() -> None:
    engine = Engine()
    width = measured(engine, 1024, 5)
    assert width.of_session in WIDTHS
    assert width.of_all in ROWS
    assert {len(tokens) for tokens in engine.read} - set(ROWS) <= set(WIDTHS)
    assert set(WIDTHS) <= {len(tokens) for tokens in engine.read}


@pytest.mark.parametrize("context", [2, 30, 256])
def test_no_row_lies_beyond_a_short_context(context: int) -> None:
    class Short(Engine):
        def forward(self, batch: PackedBatch) -> NDArray[np.float32]:
            assert batch.positions.max() < context
            return super().forward(batch)

    assert measured(Short(), context, 5).of_session in WIDTHS
