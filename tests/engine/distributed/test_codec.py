"""Values sent to other ranks arrive unchanged, in a compact form where possible."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from specdec.engine.batch import Packer
from specdec.engine.cpu.layout import RaggedPacker
from specdec.engine.distributed.codec import dumps
from specdec.engine.padded.layout import PaddedPacker

RUNS = st.lists(st.tuples(st.integers(-(2**62), 2**62), st.integers(1, 90)), max_size=12)
SHAPES = arrays.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=12)


def same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    assert one.dtype == other.dtype
    assert one.shape == other.shape
    assert np.array_equal(one, other)
    assert other.flags.writeable  # required by torch


def leaves(thing: Any) -> Iterator[Any]:
    """Yield the leaves of a batch, and of its groups if it has any."""
    if dataclasses.is_dataclass(thing):
        for field in dataclasses.fields(thing):
            yield from leaves(getattr(thing, field.name))
    elif isinstance(thing, list):
        for each in thing:
            yield from leaves(each)
    else:
        yield thing


@given(RUNS)
def test_runs(runs: list[tuple[int, int]]) -> None:
    array = np.concatenate([np.zeros(0, np.int64), *(np.arange(first, first + count) for first, count in runs)])
    same(array, pickle.loads(dumps(array)))


@given(arrays.arrays(np.int64, SHAPES) | arrays.arrays(np.bool_, SHAPES))
def test_arrays(array: Any) -> None:
    for each in (array, array.T, array[::2]):
        same(each, pickle.loads(dumps((each,)))[0])


@pytest.mark.parametrize("kind", [RaggedPacker, PaddedPacker])
def test_a_batch_is_small_and_the_same(kind: type[Packer]) -> None:
    packer = kind()
    for session in range(8):
        slots = np.arange(1000 * session, 1000 * session + 900)
        rows = packer.add_rows([1, 2, 3], 897, slots[-3:])
        packer.add_path(slots, rows)
        packer.want(rows[-1])
    batch: Any = packer.pack()
    told = dumps(("logits", batch))
    assert len(told) < len(pickle.dumps(batch)) / 4
    name, got = pickle.loads(told)
    assert name == "logits"
    assert type(got) is type(batch)
    for one, other in zip(leaves(batch), leaves(got), strict=True):
        if isinstance(one, np.ndarray):
            same(one, other)
        else:
            assert one == other
