"""Leaves below a text are packed as a tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from specdec.engine.batch import Packer
from specdec.engine.cpu.layout import RaggedPacker
from specdec.engine.gpu.layout import SplitKvPacker
from specdec.engine.padded.layout import PaddedPacker

TEXT = np.arange(100, 700)
BRANCHES = [[10, 11, 12], [10, 11, 13], [14], [10, 15]]
PACKERS: list[Callable[[], Packer]] = [RaggedPacker, SplitKvPacker, lambda: PaddedPacker(window=500, one_group=True)]


def rows_of(packer: Packer, branches: Sequence[Sequence[int]]) -> list[int]:
    rows = [packer.add_row(5, len(TEXT) + len(branch) - 1, branch[-1]) for branch in branches]
    for row in rows:
        packer.want(row)
    return rows


def arrays(value: Any) -> list[NDArray[Any]]:
    """Return all arrays in a packed batch, in order."""
    if isinstance(value, list):
        return [array for each in value for array in arrays(each)]
    if isinstance(value, np.ndarray):
        return [value]
    return arrays(list(vars(value).values())) if hasattr(value, "__dict__") else [np.asarray(value)]


@pytest.mark.parametrize("packer", PACKERS, ids=["ragged", "split-kv", "padded"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_leaves_are_a_tree(packer: Callable[[], Packer], count: int) -> None:
    branches = BRANCHES[:count]
    leaves, tree = packer(), packer()
    leaves.add_leaves(TEXT, branches, rows_of(leaves, branches))
    below = list(dict.fromkeys(slot for branch in branches for slot in branch))
    depths = {slot: depth for branch in branches for depth, slot in enumerate(branch)}
    visible = np.array([[True] * len(TEXT) + [slot in branch for slot in below] for branch in branches])
    keys = np.concatenate([TEXT, below])
    positions = np.concatenate([np.arange(len(TEXT)), [len(TEXT) + depths[slot] for slot in below]])
    tree.add_tree(keys, positions, rows_of(tree, branches), visible)
    got, want = arrays(leaves.pack()), arrays(tree.pack())
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)
