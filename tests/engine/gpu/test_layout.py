"""Every row of a split-KV batch reads the slots of its own text, each split once; shared prefixes are read once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.engine.gpu.layout import MIN_TILES, TILE_ROWS, SplitKvBatch, SplitKvPacker, tile_rows_for
from specdec.engine.gpu.staging import SplitKvTensors
from specdec.engine.kv.slots import PADDING_SLOT, Slots
from specdec.engine.partials import MAX_PARTIALS, SPLIT, WAVE_ROWS, partials_for
from specdec.engine.row_counts import InvariantRowCounts


def splits_of(batch: SplitKvBatch) -> list[dict[int, list[int]]]:
    """Return the slots of each split of every row; check that no split occurs twice."""
    found: list[dict[int, list[int]]] = [{} for _ in batch.tokens]
    for tile, count in enumerate(batch.tile_counts):
        split = int(batch.tile_splits[tile])
        for row in batch.tile_row_indices[tile, :count]:
            assert split not in found[row]
            found[row][split] = batch.tile_keys[tile].tolist()
    return found


def seen(batch: SplitKvBatch) -> list[list[int]]:
    """Return the slots read by each row."""
    result = []
    for splits, position in zip(splits_of(batch), batch.positions.tolist(), strict=True):
        assert sorted(splits) == list(range(position // SPLIT + 1))
        result.append([slot for split in sorted(splits) for slot in splits[split]][: position + 1])
    return result


def tiles(batch: SplitKvBatch) -> int:
    return int((batch.tile_counts > 0).sum())


def check_form(batch: SplitKvBatch) -> None:
    ends = [(wave.rows.stop, wave.tiles.stop) for wave in batch.waves]
    assert ends[-1] == (len(batch.tokens), len(batch.tile_counts))
    assert [(wave.rows.start, wave.tiles.start) for wave in batch.waves] == [(0, 0), *ends[:-1]]
    most = []
    for rows, places in batch.waves:
        assert rows.start % WAVE_ROWS == 0
        counts = batch.tile_counts[places]
        padded, used = len(counts), int((counts > 0).sum())
        assert padded >= MIN_TILES
        assert padded & (padded - 1) == 0
        assert padded == MIN_TILES or used > padded // 2
        assert (counts[:used] > 0).all()
        for indices, count in zip(batch.tile_row_indices[places], counts, strict=True):
            assert all(rows.start <= row < rows.stop for row in indices[:count])
        partials = [
            first + split
            for first, position in zip(batch.first_partials[rows].tolist(), batch.positions[rows].tolist(), strict=True)
            for split in range(position // SPLIT + 1)
        ]
        assert partials == list(range(len(partials)))
        most.append(len(partials))
    assert max(most) == batch.partials
    assert (batch.tile_counts <= batch.tile_row_indices.shape[1]).all()
    for array in (batch.tile_counts, batch.tile_splits, batch.tile_row_indices, batch.tile_keys, batch.first_partials):
        assert array.dtype == np.int32


def add_text(packer: SplitKvPacker, slots: Slots, new: int) -> range:
    """Add the last `new` tokens of a text."""
    start = len(slots) - new
    rows = packer.add_rows([0] * new, start, slots[start:])
    packer.add_path(slots, rows)
    return rows


def add_tree(packer: SplitKvPacker, prefix: Slots, parents: Sequence[int | None], first_slot: int) -> list[list[int]]:
    """Add the tip of a text and a tree below it, as the verifier does: a branch for each leaf, each row on the first
    path through it. Return the slots to be read by each row, in order of rows."""
    tip = packer.add_row(0, len(prefix) - 1, int(prefix[-1]))
    texts: list[Slots] = []
    rows, want = [], [prefix.tolist()]
    for index, parent in enumerate(parents):
        before = prefix if parent is None else texts[parent]
        texts.append(np.append(before, first_slot + index))
        rows.append(packer.add_row(0, len(before), first_slot + index))
        want.append(texts[-1].tolist())
    waiting = [tip]
    placed: set[int] = set()
    for leaf in range(len(parents)):
        if leaf in parents:
            continue
        path: list[int] = []
        node: int | None = leaf
        while node is not None:
            path.insert(0, node)
            node = parents[node]
        branch = texts[leaf][len(prefix) :].tolist()
        packer.add_branch(prefix, branch, waiting + [rows[node] for node in path if node not in placed])
        placed.update(path)
        waiting = []
    if waiting:
        packer.add_path(prefix, waiting)
    return want


def test_rows_of_one_path_share_tiles() -> None:
    packer = SplitKvPacker(tile_rows=4)
    keys = np.arange(1000, 1000 + SPLIT + 3)[::-1].copy()
    add_text(packer, keys, 6)
    batch = packer.pack()
    assert seen(batch) == [keys[: p + 1].tolist() for p in range(SPLIT - 3, SPLIT + 3)]
    assert [batch.tile_row_indices[u, :n].tolist() for u, n in enumerate(batch.tile_counts) if n] == [
        [0, 1, 2, 3],
        [4, 5],
        [3, 4, 5],
    ]
    assert batch.tile_splits[:3].tolist() == [0, 0, 1]
    assert batch.tile_keys[2, 3:].tolist() == [PADDING_SLOT] * (SPLIT - 3)
    assert batch.first_partials.tolist() == [0, 1, 2, 3, 5, 7]


def test_leaves_read_what_they_share_once() -> None:
    """Each leaf separately reads the split in which they differ."""
    packer = SplitKvPacker(tile_rows=16)
    prefix = np.arange(1, 1 + 3 * SPLIT + 100)
    want = add_tree(packer, prefix, [None, 0, 0, None, 3], 5000)
    batch = packer.pack()
    assert seen(batch) == want
    assert tiles(batch) == 3 + 3
    assert batch.tile_counts[batch.tile_splits == 3].tolist().count(0) == 0
    assert sorted(batch.tile_counts[:6].tolist()) == [1, 2, 3, 6, 6, 6]


def test_sessions_read_a_shared_prefix_once() -> None:
    """Wherever in the batch these sessions are."""
    packer = SplitKvPacker(tile_rows=16)
    common = np.arange(1, 1 + 2 * SPLIT)
    for first in (2000, 4000, 6000):
        add_text(packer, np.arange(10000 + first, 10000 + first + 300), 1)
        add_text(packer, np.concatenate([common, np.arange(first, first + 10)]), 1)
    batch = packer.pack()
    assert tiles(batch) == 3 * 2 + 2 + 3
    of_common = batch.tile_keys[:, 0] == 1
    assert batch.tile_counts[of_common].tolist() == [3]
    check_form(batch)


def test_texts_that_part_within_a_split_share_only_those_before() -> None:
    packer = SplitKvPacker()
    ones = np.arange(1, 1 + 2 * SPLIT)
    others = np.append(ones[:-1], 9999)
    add_text(packer, ones, 1)
    add_text(packer, others, 1)
    batch = packer.pack()
    assert seen(batch) == [ones.tolist(), others.tolist()]
    assert tiles(batch) == 3


def test_padding_reads_and_writes_nowhere() -> None:
    packer = SplitKvPacker(rows=InvariantRowCounts((4, 8)), tile_rows=2)
    keys = np.arange(10, 15)
    rows = add_text(packer, keys, 5)
    packer.want(rows[4])
    batch = packer.pack()
    assert batch.slots.tolist() == [10, 11, 12, 13, 14, *[PADDING_SLOT] * 3]
    assert seen(batch)[5:] == [[PADDING_SLOT]] * 3
    assert batch.wanted.tolist() == [4] * 4
    check_form(batch)


@st.composite
def trees(draw: st.DrawFn) -> list[int | None]:
    """Draw each node's parent, among earlier nodes."""
    count = draw(st.integers(0, 8))
    return [draw(st.one_of(st.none(), st.integers(0, i - 1))) if i else None for i in range(count)]


LENGTHS = st.one_of(st.integers(1, 20), st.integers(SPLIT - 4, SPLIT + 4), st.integers(1, 3 * SPLIT))


@given(
    st.lists(st.tuples(LENGTHS, st.one_of(trees(), st.integers(1, 300)), st.integers(0, 2 * SPLIT)), max_size=5),
    st.integers(1, 20),
    st.sampled_from([None, InvariantRowCounts((1, 2, 3)), InvariantRowCounts((6, 16))]),
    st.sampled_from([24, 50, MAX_PARTIALS]),
)
def test_any_mixture_reads_what_was_put_in(
    texts: list[tuple[int, list[int | None] | int, int]],
    tile_rows: int,
    rows: InvariantRowCounts | None,
    most_partials: int,
) -> None:
    """Prompts and trees, in one wave or several; some share the beginning of the previous text."""
    packer = SplitKvPacker(rows=rows, tile_rows=tile_rows, most_partials=most_partials)
    before, slot, want = np.arange(0), 1, []
    for length, what, shared in [(5, 2, 0), *texts]:
        own = np.arange(slot, slot + length)[::-1]
        slot += length
        prefix = np.concatenate([before[:shared], own])
        if isinstance(what, int):
            new = min(what, length)
            add_text(packer, prefix, new)
            want += [prefix[: end + 1].tolist() for end in range(len(prefix) - new, len(prefix))]
        else:
            want += add_tree(packer, prefix, what, slot)
            slot += len(what)
        before = prefix
    batch = packer.pack()
    assert seen(batch)[: len(want)] == want
    assert rows is None or rows.padded(len(batch.tokens)) == len(batch.tokens)
    check_form(batch)
    assert batch.partials <= most_partials
    batch.check(slot, int(batch.positions.max()) + 1)


@pytest.mark.parametrize("longest", [100, 1 << 17, 10_000_001])
def test_a_text_of_any_length_has_room_for_a_wave(longest: int) -> None:
    assert partials_for(longest) >= WAVE_ROWS * -(-longest // SPLIT)


@pytest.mark.parametrize(("shared", "tile_rows"), [(1, 64), (4, 16), (7, 9), (64, 1), (71, 1)])
def test_a_tile_has_room_for_the_rows_that_fill_it(shared: int, tile_rows: int) -> None:
    assert tile_rows_for(shared) == tile_rows
    assert tile_rows * shared <= max(TILE_ROWS, shared)


def test_a_row_beyond_its_path_is_refused() -> None:
    packer = SplitKvPacker()
    with pytest.raises(ValueError, match="a row at position 3 needs 4 keys, its path has 3"):
        packer.add_path(np.arange(1, 4), packer.add_rows([1, 2], 2, [3, 4]))


@pytest.mark.parametrize("times", [0, 2])
def test_a_row_on_no_path_or_two_is_refused(times: int) -> None:
    packer = SplitKvPacker()
    add_text(packer, np.arange(1, 3), 2)
    row = packer.add_row(3, 2, 3)
    for _ in range(times):
        packer.add_path(np.arange(1, 4), [row])
    with pytest.raises(ValueError, match=f"row 2 is on {times} paths"):
        packer.pack()


@pytest.mark.parametrize(
    ("keys", "slot", "wrong"), [([1, 9], 2, 9), ([1, 2], 9, 9), ([-1, 2], 2, -1), ([1, 2], -1, -1)]
)
def test_slots_that_do_not_exist_are_refused(keys: list[int], slot: int, wrong: int) -> None:
    packer = SplitKvPacker()
    packer.add_path(np.array(keys), [packer.add_row(1, 1, slot)])
    batch = packer.pack()
    with pytest.raises(ValueError, match=rf"slots must lie in 0\.\.8, one is {wrong}"):
        batch.check(9, 2)
    if wrong > 0:
        batch.check(10, 2)


def test_positions_that_do_not_exist_are_refused() -> None:
    packer = SplitKvPacker()
    add_text(packer, np.arange(1, 6), 2)
    batch = packer.pack()
    with pytest.raises(ValueError, match=r"positions must lie in 0\.\.3, one is 4"):
        batch.check(6, 4)
    batch.check(6, 5)


def test_tensors_hold_one_batch_after_another_at_one_place() -> None:
    def batch(first: int, length: int) -> SplitKvBatch:
        packer = SplitKvPacker(tile_rows=3)
        packer.want(add_text(packer, np.arange(first, first + length), 4)[-1])
        return packer.pack()

    one, other, longer = batch(5, 300), batch(700, 500), batch(5, 2500)
    tensors = SplitKvTensors.of(one, "cpu")
    for each in (one, other):
        tensors.fill(each)
        for name in ("tokens", "positions", "slots", "wanted", "first_partials", "tile_counts", "tile_splits",
                     "tile_row_indices", "tile_keys"):  # fmt: skip
            assert getattr(tensors, name).tolist() == getattr(each, name).tolist()
    with pytest.raises(ValueError, match=r"tile_counts has shape \(32,\), the tensors are for \(8,\)"):
        tensors.fill(longer)
    assert tensors.tokens.tolist() == other.tokens.tolist()
    assert tensors.tile_keys.tolist() == other.tile_keys.tolist()
