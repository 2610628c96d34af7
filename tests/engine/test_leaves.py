"""Leaves below a text are packed as the paths to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from specdec.engine.batch import Packer
from specdec.engine.cpu.layout import RaggedPacker
from specdec.engine.gpu.layout import SplitKvPacker

TEXT = np.arange(100, 700)
BRANCHES = [[10, 11, 12], [10, 11, 13], [14], [10, 15]]
PACKERS: list[Callable[[], Packer]] = [RaggedPacker, SplitKvPacker]


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


@pytest.mark.parametrize("packer", PACKERS, ids=["ragged", "split-kv"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_leaves_are_paths(packer: Callable[[], Packer], count: int) -> None:
    branches = BRANCHES[:count]
    leaves, paths = packer(), packer()
    leaves.add_leaves(TEXT, branches, rows_of(leaves, branches))
    for branch, row in zip(branches, rows_of(paths, branches), strict=True):
        paths.add_path(np.concatenate([TEXT, branch]), [row])
    got, want = arrays(leaves.pack()), arrays(paths.pack())
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)
