"""Block batches: packed paths, and refusals."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.engine.kv.blocks import BLOCK
from specdec.engine.kv.slots import PADDING_SLOT, Slots
from specdec.engine.vllm.layout import BlockPacker
from tests.paged import slots_of

SEQUENCES = st.lists(st.tuples(st.integers(0, 3 * BLOCK), st.integers(1, 2 * BLOCK)), min_size=1, max_size=6)
"""For each sequence, the number of tokens before its rows, and of rows."""


def keys_of(number: int, length: int) -> Slots:
    """Return the slots of a text in its own blocks, out of order."""
    return slots_of(10 * number + np.array([5, 3, 7, 2, 6, 1]))[:length]


@given(SEQUENCES)
def test_every_row_keeps_its_token_place_and_text(sequences: list[tuple[int, int]]) -> None:
    packer = BlockPacker()
    wanted: dict[int, tuple[int, int]] = {}  # index among the results -> number of the text, position
    for number, (before, count) in enumerate(sequences):
        keys = keys_of(number, before + count + 5)
        rows = packer.add_rows([1000 * number + place for place in range(count)], before, keys[before : before + count])
        packer.add_path(keys, rows)
        for row in (rows[0], rows[-1]):
            wanted[packer.want(row)] = number, before + row - rows[0]
    batch = packer.pack()
    assert batch.starts[-1] == len(batch.tokens) == sum(count for _, count in sequences)
    counts = np.diff(batch.starts).tolist()
    assert counts == sorted(counts)
    seen = []
    for (first, end), length, table in zip(pairwise(batch.starts.tolist()), batch.lengths, batch.tables, strict=True):
        number, place = divmod(int(batch.tokens[first]), 1000)
        before, count = sequences[number]
        assert place == 0
        assert batch.tokens[first:end].tolist() == [1000 * number + each for each in range(count)]
        assert batch.positions[first:end].tolist() == list(range(before, before + count))
        assert length == before + count
        assert slots_of(table)[:length].tolist() == keys_of(number, length).tolist()
        assert batch.slots[first:end].tolist() == keys_of(number, length)[before:].tolist()
        seen.append(number)
    assert sorted(seen) == list(range(len(sequences)))
    for index, (number, position) in wanted.items():
        row = batch.wanted[index]
        assert (batch.tokens[row] // 1000, batch.positions[row]) == (number, position)


def test_padding_is_a_sequence_of_its_own() -> None:
    packer = BlockPacker()
    packer.add_path(np.array([PADDING_SLOT]), [packer.add_row(0, 0, PADDING_SLOT)])
    batch = packer.pack()
    assert batch.lengths.tolist() == [1]
    assert batch.tables[0].tolist() == [0]


def packed(keys: Slots, positions: list[int], slots: list[int]) -> None:
    packer = BlockPacker()
    packer.add_path(keys, [packer.add_row(7, position, slot) for position, slot in zip(positions, slots, strict=True)])


def test_what_is_no_sequence_is_refused() -> None:
    keys = BLOCK + np.arange(10)
    packed(keys, [3, 4], [BLOCK + 3, BLOCK + 4])
    for positions, slots in (([3, 5], [BLOCK + 3, BLOCK + 5]), ([4, 3], [BLOCK + 4, BLOCK + 3])):
        with pytest.raises(ValueError, match="consecutive"):
            packed(keys, positions, slots)
    with pytest.raises(ValueError, match="in its blocks"):  # a side branch
        packed(keys, [3], [2 * BLOCK + 3])
    with pytest.raises(ValueError, match="in its blocks"):
        packed(np.arange(10) + BLOCK + 1, [3], [BLOCK + 4])
    with pytest.raises(ValueError, match="needs 11 keys, its path has 10"):
        packed(keys, [10], [BLOCK + 10])
    packer = BlockPacker()
    with pytest.raises(ValueError, match="in its blocks"):
        packer.add_branch(keys[:3], [2 * BLOCK + 3], [packer.add_row(7, 3, 2 * BLOCK + 3)])
    packer = BlockPacker()
    packer.add_row(7, 3, BLOCK + 3)
    packer.add_path(keys, [packer.add_row(7, 3, BLOCK + 3)])
    with pytest.raises(ValueError, match="every row"):
        packer.pack()
