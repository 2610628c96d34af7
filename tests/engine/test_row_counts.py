"""Any number of rows is split into invariant row counts, with the least possible padding."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from specdec.engine.row_counts import InvariantRowCounts, ShapeRowCounts

classes = st.sets(st.integers(1, 100), min_size=1).map(lambda counts: InvariantRowCounts(tuple(sorted(counts))))


@given(classes, st.integers(0, 1000))
def test_tiles_are_members_and_hold_all(rows: InvariantRowCounts, count: int) -> None:
    tiles = rows.tiles(count)
    assert set(tiles) <= set(rows.counts)
    assert rows.padded(count) == sum(tiles) >= count
    assert tiles == sorted(tiles, reverse=True)
    assert sum(tiles[:-1]) < count or not count


@given(classes, st.integers(0, 1000))
def test_what_is_padded_is_tiled_without_padding(rows: InvariantRowCounts, count: int) -> None:
    padded = rows.padded(count)
    assert rows.padded(padded) == padded
    assert rows.tiles(padded) == rows.tiles(count)


@given(classes, st.integers(1, 100))
def test_no_smaller_member_would_hold_the_rest(rows: InvariantRowCounts, count: int) -> None:
    last = rows.tiles(count)[-1]
    rest = count - sum(rows.tiles(count)[:-1])
    assert all(member < rest for member in rows.counts if member < last)


@pytest.mark.parametrize(
    ("count", "tiles"), [(0, []), (1, [4]), (4, [4]), (5, [16]), (16, [16]), (17, [16, 4]), (40, [16, 16, 16])]
)
def test_examples(count: int, tiles: list[int]) -> None:
    assert InvariantRowCounts((4, 16)).tiles(count) == tiles


@given(classes, st.integers(0, 1000))
def test_exact_tiles_are_members_that_add_up(rows: InvariantRowCounts, count: int) -> None:
    tiles = rows.exact_tiles(count)
    if tiles is None:
        assert rows.counts[0] > 1
        assert count not in rows.counts
    else:
        assert sum(tiles) == count
        assert set(tiles) <= set(rows.counts)


@given(classes, st.sets(st.integers(1, 40), min_size=1), st.integers(1, 300))
def test_a_padded_batch_has_tiles_in_every_class(batch: InvariantRowCounts, own: set[int], count: int) -> None:
    product = InvariantRowCounts(tuple(sorted(own)))
    possible = tuple(each for each in batch.counts if product.exact_tiles(each))
    assume(possible)
    rows = ShapeRowCounts(InvariantRowCounts(possible), {(8, 4): product})
    padded = rows.batch.padded(count)
    tiles = rows.tiles((8, 4), padded)
    assert sum(tiles) == padded
    assert set(tiles) <= own
    assert rows.tiles((9, 9), padded) == rows.batch.tiles(padded)


@given(classes, st.integers(1, 120), st.integers(1, 300))
def test_classes_are_cut_where_all_batches_can_do_without(own: InvariantRowCounts, largest: int, count: int) -> None:
    batch = InvariantRowCounts(tuple(each for each in range(1, 100) if own.exact_tiles(each)))
    assume(batch.counts)
    rows = ShapeRowCounts(batch, {(8, 4): own, (4, 8): own})
    cut = rows.cut({(8, 4): largest})
    padded = batch.padded(count)
    tiles = cut.tiles((8, 4), padded)
    assert sum(tiles) == padded
    assert set(tiles) <= set(own.counts)
    smaller = InvariantRowCounts(tuple(each for each in own.counts if each <= largest))
    if largest in own.counts and all(smaller.exact_tiles(each) for each in batch.counts):
        assert max(tiles) <= largest
    else:
        assert tiles == rows.tiles((8, 4), padded)
    assert cut.tiles((4, 8), padded) == rows.tiles((4, 8), padded)
    assert cut.batch == rows.batch
