"""A packed batch represents its input, in the layout that exactness relies on.

Every lane is read back through `rows`, `keys`, `visible` and `place`: a token must see its own text up to itself, or
its mask, within the sliding window. Keys are padded to a length that depends on the positions of the rows alone, lanes
to at least four rows. Padding reads PADDING_SLOT, is masked, and never becomes a token's result.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.engine.kv.slots import PADDING_SLOT, Slots
from specdec.engine.padded.layout import KEY_BUCKET, MIN_ROWS, GroupMemory, PaddedBatch, PaddedPacker

Seen = dict[int, set[int]]
"""Slots seen by each token, by the token's index."""


def slots_from(first: int, count: int) -> Slots:
    return np.arange(first, first + count)


def read(batch: PaddedBatch, *, windowed: bool = False) -> Seen:
    """Return the slots seen by each token, as attention finds them: by the token's place in the rows of all groups."""
    rows: list[int] = []
    seen: list[set[int]] = []
    for group in batch.groups:
        masks = group.windowed if windowed else group.visible
        assert masks is not None
        for lane_rows, lane_keys, lane_mask in zip(group.rows, group.keys, masks, strict=True):
            for row, mask in zip(lane_rows, lane_mask, strict=True):
                rows.append(int(row))
                seen.append(set(lane_keys[mask].tolist()))
    for token, place in enumerate(batch.place):
        assert rows[place] == token
    return {token: seen[place] for token, place in enumerate(batch.place)}


def check_layout(batch: PaddedBatch, least_rows: int = MIN_ROWS) -> None:
    """Check the invariants of every group of a batch with lanes of several shapes."""
    for group in batch.groups:
        lanes, rows, keys = group.visible.shape
        assert group.keys.shape == (lanes, keys)
        assert group.rows.shape == (lanes, rows)
        assert keys % KEY_BUCKET == 0
        assert rows >= least_rows
        assert rows & (rows - 1) == 0
        assert group.visible.any(axis=-1).all()  # a softmax over nothing is NaN
        if group.windowed is not None:
            assert group.windowed.any(axis=-1).all()
            assert not (group.windowed & ~group.visible).any()


class TestRows:
    def test_rows_are_numbered_as_they_come(self) -> None:
        packer = PaddedPacker()
        assert packer.add_rows([7, 8, 9], 4, slots_from(11, 3)) == range(3)
        assert packer.add_row(5, 0, 20) == 3
        assert packer.add_rows([6], 1, [21]) == range(4, 5)
        packer.add_path(slots_from(7, 7), [0, 1, 2])
        packer.add_path(slots_from(20, 2), [3, 4])
        assert packer.want(2) == 0
        assert packer.want(4) == 1
        batch = packer.pack()
        assert batch.tokens.tolist() == [7, 8, 9, 5, 6]
        assert batch.positions.tolist() == [4, 5, 6, 0, 1]
        assert batch.slots.tolist() == [11, 12, 13, 20, 21]
        assert batch.wanted.tolist() == [2, 4]
        for array in (batch.tokens, batch.positions, batch.slots, batch.place, batch.wanted):
            assert array.dtype == np.int64

    def test_a_batch_may_want_nothing(self) -> None:
        packer = PaddedPacker()
        packer.add_path(slots_from(1, 2), packer.add_rows([1, 2], 0, [1, 2]))
        assert packer.pack().wanted.shape == (0,)


class TestPath:
    def test_a_row_sees_its_text_up_to_itself(self) -> None:
        packer = PaddedPacker()
        keys = slots_from(30, 8)
        packer.add_path(keys, packer.add_rows([1, 2, 3], 5, keys[5:]))
        batch = packer.pack()
        check_layout(batch)
        assert read(batch) == {0: set(range(30, 36)), 1: set(range(30, 37)), 2: set(range(30, 38))}

    @pytest.mark.parametrize(("position", "padded"), [(0, 64), (62, 64), (63, 64), (64, 128), (127, 128), (128, 192)])
    def test_the_padded_length_depends_on_the_row_position_alone(self, position: int, padded: int) -> None:
        """Not on the number of keys: a plain step and a row inside a long prompt are padded alike."""
        for length in (position + 1, position + 100):
            packer = PaddedPacker()
            packer.add_path(slots_from(1, length), [packer.add_row(1, position, 1 + position)])
            (group,) = packer.pack().groups
            assert group.keys.shape == (1, padded)

    def test_rows_on_both_sides_of_a_bucket_are_different_lanes(self) -> None:
        packer = PaddedPacker()
        keys = slots_from(1, 70)
        packer.add_path(keys, packer.add_rows(range(10), 60, keys[60:]))
        batch = packer.pack()
        check_layout(batch)
        assert [group.keys.shape for group in batch.groups] == [(1, 64), (1, 128)]
        assert read(batch) == {i: set(range(1, 62 + i)) for i in range(10)}

    @pytest.mark.parametrize(("rows", "width"), [(1, 4), (3, 4), (4, 4), (5, 8), (9, 16), (16, 16)])
    def test_lanes_have_a_power_of_two_of_rows_and_at_least_four(self, rows: int, width: int) -> None:
        packer = PaddedPacker()
        packer.add_path(slots_from(1, rows), packer.add_rows(range(rows), 0, slots_from(1, rows)))
        (group,) = packer.pack().groups
        assert group.rows.shape == (1, width)

    def test_least_rows_can_be_one(self) -> None:
        packer = PaddedPacker(least_rows=1)
        packer.add_path(slots_from(1, 3), [packer.add_row(1, 2, 3)])
        (group,) = packer.pack().groups
        assert group.rows.tolist() == [[0]]

    def test_padding_repeats_row_0_and_sees_one_key(self) -> None:
        packer = PaddedPacker(window=2)
        packer.add_row(9, 0, 1)
        packer.add_path(slots_from(1, 1), [0])
        packer.add_path(slots_from(5, 6), packer.add_rows([1, 2], 4, [9, 10]))
        (group,) = packer.pack().groups
        assert group.rows.tolist() == [[0, 0, 0, 0], [1, 2, 1, 1]]
        assert group.keys[1].tolist() == [5, 6, 7, 8, 9, 10] + [PADDING_SLOT] * 58
        assert group.windowed is not None
        for masks in (group.visible, group.windowed):
            assert [np.flatnonzero(mask).tolist() for mask in masks[1, 2:]] == [[0], [0]]


class TestTree:
    def test_leaves_are_one_lane_and_see_their_own_branch(self) -> None:
        """Two children of a tip at position 2: neither sees the other."""
        packer = PaddedPacker()
        rows = [packer.add_row(7, 2, 6), packer.add_row(8, 3, 20), packer.add_row(9, 3, 21)]
        packer.add_leaves(np.array([4, 5]), [[6], [6, 20], [6, 21]], rows)
        batch = packer.pack()
        check_layout(batch)
        assert len(batch.groups) == len(batch.groups[0].keys) == 1
        assert read(batch) == {0: {4, 5, 6}, 1: {4, 5, 6, 20}, 2: {4, 5, 6, 21}}

    def test_leaves_look_back_by_position_not_by_index(self) -> None:
        packer = PaddedPacker(window=2)
        rows = [packer.add_row(7, 4, 22), packer.add_row(8, 4, 23)]
        packer.add_leaves(np.array([4, 5, 6]), [[20, 22], [21, 23]], rows)
        batch = packer.pack()
        assert read(batch) == {0: {4, 5, 6, 20, 22}, 1: {4, 5, 6, 21, 23}}
        assert read(batch, windowed=True) == {0: {20, 22}, 1: {21, 23}}

    def test_a_row_shared_by_paths_is_in_each_lane_and_has_one_place(self) -> None:
        packer = PaddedPacker()
        shared, left, right = packer.add_row(1, 1, 2), packer.add_row(2, 2, 3), packer.add_row(3, 2, 4)
        packer.add_path(np.array([1, 2, 3]), [shared, left])
        packer.add_path(np.array([1, 2, 4]), [shared, right])
        batch = packer.pack()
        check_layout(batch)
        assert read(batch) == {shared: {1, 2}, left: {1, 2, 3}, right: {1, 2, 4}}


class TestWindow:
    def test_without_a_window_there_is_no_second_mask(self) -> None:
        packer = PaddedPacker()
        packer.add_path(slots_from(1, 3), packer.add_rows([1, 2, 3], 0, [1, 2, 3]))
        (group,) = packer.pack().groups
        assert group.windowed is None

    @pytest.mark.parametrize("window", [1, 3, 100])
    def test_a_row_sees_that_many_keys_itself_included(self, window: int) -> None:
        packer = PaddedPacker(window=window)
        keys = slots_from(1, 80)
        packer.add_path(keys, packer.add_rows(range(80), 0, keys))
        batch = packer.pack()
        check_layout(batch)
        assert read(batch) == {i: set(range(1, i + 2)) for i in range(80)}
        assert read(batch, windowed=True) == {i: set(range(max(1, i + 2 - window), i + 2)) for i in range(80)}


class TestGroups:
    def test_lanes_of_one_shape_stack_in_one_group(self) -> None:
        packer = PaddedPacker()
        for first in (1, 101, 201):
            packer.add_path(slots_from(first, 10), [packer.add_row(1, 9, first + 9)])
        packer.add_path(slots_from(301, 70), [packer.add_row(1, 69, 370)])
        assert [group.rows.shape[0] for group in packer.pack().groups] == [3, 1]

    def test_one_group_pads_all_lanes_to_one_shape(self) -> None:
        packer = PaddedPacker(group_memory=GroupMemory(2 * 128 * (10 + 6), key_bytes=10, pair_bytes=1))
        packer.add_path(slots_from(1, 10), [packer.add_row(1, 9, 10)])
        packer.add_path(slots_from(101, 70), packer.add_rows(range(6), 64, slots_from(165, 6)))
        batch = packer.pack()
        (group,) = batch.groups
        assert group.visible.shape == (2, 6, 128)
        assert not group.contiguous
        assert read(batch) == {0: set(range(1, 11))} | {1 + i: set(range(101, 166 + i)) for i in range(6)}

    def test_a_long_text_beside_short_ones_does_not_lengthen_them(self) -> None:
        """Padded to one shape, the 64 short texts would need 2 GB."""
        memory = GroupMemory(1 << 25, key_bytes=1024, pair_bytes=56)
        packer = PaddedPacker(group_memory=memory)
        long = slots_from(10_000, 30_000)
        packer.add_path(long, packer.add_rows(range(9), 29_991, long[-9:]))
        for first in range(1, 6401, 100):
            packer.add_path(slots_from(first, 90), [packer.add_row(1, 89, first + 89)])
        short, alone = packer.pack().groups
        assert short.visible.shape == (64, 1, 128)
        assert alone.visible.shape == (1, 9, 30_016)

    @pytest.mark.parametrize(
        ("keys", "contiguous"),
        [([5, 6, 7], True), ([5], True), ([5, 7, 8], False), ([7, 6, 5], False), ([5, 7, 6, 8], False)],
    )
    def test_a_single_lane_of_consecutive_slots_is_a_view(self, keys: Sequence[int], contiguous: bool) -> None:
        packer = PaddedPacker()
        packer.add_path(np.array(keys), [packer.add_row(1, len(keys) - 1, keys[-1])])
        (group,) = packer.pack().groups
        assert group.contiguous is contiguous

    def test_two_lanes_are_no_view(self) -> None:
        packer = PaddedPacker()
        packer.add_path(slots_from(1, 3), [packer.add_row(1, 2, 3)])
        packer.add_path(slots_from(4, 3), [packer.add_row(1, 2, 6)])
        (group,) = packer.pack().groups
        assert not group.contiguous


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(st.tuples(st.integers(0, 140), st.integers(1, 12)), min_size=1, max_size=6),
    most=st.sampled_from([None, 1, 1 << 11, 1 << 14, 1 << 30]),
    window=st.none() | st.integers(1, 40),
    least_rows=st.sampled_from([1, MIN_ROWS]),
)
def test_any_mixture_of_texts_says_what_was_put_in(
    texts: list[tuple[int, int]], most: int | None, window: int | None, least_rows: int
) -> None:
    """Texts of (tokens already computed, new tokens), on slots in a shuffled order. Groups of one shape are within
    `most` bytes, unless a single lane is not, and can be computed in order: no row reads one of a later group."""
    memory = None if most is None else GroupMemory(most, key_bytes=4, pair_bytes=2)
    packer = PaddedPacker(window=window, group_memory=memory, least_rows=least_rows)
    free = np.random.default_rng(0).permutation(np.arange(1, 2000))
    expected: Seen = {}
    near: Seen = {}
    for done, new in texts:
        keys, free = free[: done + new], free[done + new :]
        rows = packer.add_rows(range(new), done, keys[done:])
        packer.add_path(keys, rows)
        packer.want(rows[-1])
        for i, row in enumerate(rows):
            end = done + i + 1
            expected[row] = set(keys[:end].tolist())
            near[row] = set(keys[max(0, end - (window or end)) : end].tolist())
    batch = packer.pack()
    assert read(batch) == expected
    if window is not None:
        assert read(batch, windowed=True) == near
    if memory is None:
        check_layout(batch, least_rows)
        return
    written: set[int] = set(range(2000)) - set(batch.slots.tolist())
    found: list[int] = []
    for group, (wanted, part) in zip(batch.groups, batch.parts(), strict=True):
        lanes, width, length = group.visible.shape
        assert memory.holds(lanes, width, length) or lanes == 1
        written |= set(part.slots.tolist())
        own = batch.wanted[wanted].tolist()
        assert part.tokens[part.wanted].tolist() == batch.tokens[own].tolist()
        for row, seen in read(part).items():
            whole = int(np.flatnonzero(batch.slots == part.slots[row])[0])
            assert seen == expected[whole] <= written
            assert part.positions[row] == batch.positions[whole]
            found.append(whole)
    assert sorted(found) == list(range(len(batch.tokens)))
    assert most != 1 << 30 or len(batch.groups) == 1
