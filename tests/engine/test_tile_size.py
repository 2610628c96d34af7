"""The tile size minimizes the time per row."""

from __future__ import annotations

import pytest

from specdec.engine.tile_size import cheapest

LONG = 0.2


@pytest.mark.parametrize(
    ("seconds", "most", "rows"),
    [
        ({128: 0.01, 256: 0.02, 512: 0.04}, 512, 512),  # as cheap in larger tiles: fewer steps
        ({128: 0.02, 256: 0.03, 512: 0.07}, 512, 256),
        ({128: 0.0192, 256: 0.04, 512: 0.08}, 512, 512),  # within noise
        ({128: 0.02, 256: 0.05, 300: 0.06}, 300, 128),
        ({}, 100, 100),  # there is no choice
        ({128: 0.15, 256: 1.01 * LONG}, 512, 256),  # no larger tile is tried
        ({128: 0.05, 256: 1.01 * LONG}, 512, 128),
    ],
)
def test_as_many_rows_as_make_a_row_the_cheapest(seconds: dict[int, float], most: int, rows: int) -> None:
    assert cheapest(seconds.__getitem__, most, LONG) == rows


@pytest.mark.parametrize(
    ("seconds", "rows"),
    [
        ({128: 0.01, 256: 0.02, 512: 0.04}, 128),
        ({128: 0.0107, 256: 0.02, 512: 0.04}, 128),  # within noise
        ({128: 0.011, 256: 0.02, 512: 0.04}, 256),
        ({128: 0.02, 256: 0.03, 512: 0.05}, 512),
        ({128: 0.15, 256: 1.01 * LONG}, 256),
    ],
)
def test_or_as_few_as_are_as_cheap(seconds: dict[int, float], rows: int) -> None:
    assert cheapest(seconds.__getitem__, 512, LONG, few=True) == rows


def test_a_slow_spell_falls_on_all_alike() -> None:
    """Two of three rounds are slow."""
    taken = iter([0.09, 0.09, 0.09, 0.01, 0.018, 0.035, 0.09, 0.09, 0.09])
    assert cheapest(lambda rows: next(taken), 512) == 512


def test_where_one_size_is_left_it_is_measured_once() -> None:
    asked: list[int] = []

    def measured(rows: int) -> float:
        asked.append(rows)
        return 1.01 * LONG

    assert cheapest(measured, 512, LONG) == 128
    assert asked == [128]


@pytest.mark.parametrize(("seconds", "repeats"), [(0.01, 3), (0.3, 2)])
def test_long_measurements_are_repeated_less(seconds: float, repeats: int) -> None:
    asked: list[int] = []

    def measured(rows: int) -> float:
        asked.append(rows)
        return seconds

    cheapest(measured, 512)
    assert asked == [128, 256, 512] * repeats
