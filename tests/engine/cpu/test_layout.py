"""Every row of a path batch reads the slots of its own text, in order; impossible input is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.engine.cpu.layout import RaggedBatch, RaggedPacker
from specdec.engine.kv.slots import PADDING_SLOT
from specdec.engine.row_counts import InvariantRowCounts


def seen(batch: RaggedBatch) -> list[list[int]]:
    """Return the slots read by each row."""
    return [batch.keys[f : f + p + 1].tolist() for f, p in zip(batch.first, batch.positions, strict=True)]


def test_rows_of_one_path_share_its_slots() -> None:
    packer = RaggedPacker()
    keys = np.array([7, 3, 9, 4, 5])
    packer.add_path(keys, packer.add_rows([1, 2, 3], 2, keys[2:]))
    batch = packer.pack()
    assert seen(batch) == [[7, 3, 9], [7, 3, 9, 4], [7, 3, 9, 4, 5]]
    assert len(batch.keys) == 5
    assert (batch.tokens.tolist(), batch.slots.tolist()) == ([1, 2, 3], [9, 4, 5])


def test_a_tree_is_a_path_for_each_leaf() -> None:
    """The tip and inner nodes are rows of the first path through them: they read the same slots on any path."""
    packer = RaggedPacker()
    tip, inner, left, right = (
        packer.add_row(token, position, 10 + token) for token, position in ((0, 1), (1, 2), (2, 3), (3, 3))
    )
    packer.add_path(np.array([5, 10, 11, 12]), [tip, inner, left])
    packer.add_path(np.array([5, 10, 11, 13]), [right])
    assert seen(packer.pack()) == [[5, 10], [5, 10, 11], [5, 10, 11, 12], [5, 10, 11, 13]]


def test_padding_reads_and_writes_nowhere_and_wants_the_first_row() -> None:
    packer = RaggedPacker(rows=InvariantRowCounts((4, 8)))
    keys = np.arange(10, 15)
    rows = packer.add_rows([1, 2, 3, 4, 5], 0, keys)
    packer.add_path(keys, rows)
    packer.want(rows[4])
    batch = packer.pack()
    assert batch.slots.tolist() == [10, 11, 12, 13, 14, *[PADDING_SLOT] * 3]
    assert seen(batch)[5:] == [[PADDING_SLOT]] * 3
    assert batch.wanted.tolist() == [4] * 4


def test_a_batch_that_wants_nothing_is_padded_too() -> None:
    packer = RaggedPacker(rows=InvariantRowCounts((4, 8)))
    packer.add_path(np.arange(1, 3), packer.add_rows([1, 2], 0, np.arange(1, 3)))
    batch = packer.pack()
    assert (len(batch.tokens), len(batch.wanted)) == (4, 4)


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30)), min_size=1, max_size=6),
    st.sampled_from([None, InvariantRowCounts((1, 2, 3)), InvariantRowCounts((6, 16))]),
)
def test_any_mixture_reads_what_was_put_in(texts: list[tuple[int, int]], rows: InvariantRowCounts | None) -> None:
    """`texts`: each text's numbers of tokens already computed, and of new ones."""
    packer, want, slot = RaggedPacker(rows=rows), [], 1
    for done, new in texts:
        keys = np.arange(slot, slot + done + new)[::-1].copy()
        slot += done + new
        packer.add_path(keys, packer.add_rows([0] * new, done, keys[done:]))
        want += [keys[: done + i + 1].tolist() for i in range(new)]
    batch = packer.pack()
    assert seen(batch)[: len(want)] == want
    assert rows is None or rows.padded(len(batch.tokens)) == len(batch.tokens)
    batch.check(slot)
    for array in (batch.tokens, batch.positions, batch.slots, batch.wanted, batch.keys, batch.first):
        assert array.dtype == np.int64


def test_a_row_beyond_its_path_is_refused() -> None:
    packer = RaggedPacker()
    with pytest.raises(ValueError, match="a row at position 3 needs 4 keys, its path has 3"):
        packer.add_path(np.arange(1, 4), packer.add_rows([1, 2], 2, [3, 4]))


@pytest.mark.parametrize(("keys", "slot"), [([1, 9], 2), ([1, 2], 9), ([-1, 2], 2), ([1, 2], -1)])
def test_slots_that_do_not_exist_are_refused(keys: list[int], slot: int) -> None:
    packer = RaggedPacker()
    packer.add_path(np.array(keys), [packer.add_row(1, 1, slot)])
    batch = packer.pack()
    with pytest.raises(ValueError, match=r"slots must lie in 0\.\.8"):
        batch.check(9)
    if min(slot, *keys) >= 0:
        batch.check(10)


def test_a_row_without_a_path_is_refused() -> None:
    packer = RaggedPacker()
    packer.add_path(np.arange(1, 3), packer.add_rows([1, 2], 0, [1, 2]))
    packer.add_row(3, 2, 3)
    with pytest.raises((KeyError, ValueError)):
        packer.pack()
