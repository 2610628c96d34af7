"""A loop shared by a team of threads gives the same result as alone."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from specdec.engine.cpu import openmp

shared_only = pytest.mark.skipif(
    not openmp.AVAILABLE, reason="torch has brought no OpenMP runtime of the GNU interface"
)


@openmp.shared()
def scale(values: Any, factor: Any, out: Any, threads: Any, cuts: Any) -> None:
    for row in range(cuts[0], cuts[1]):
        threads[row] = cuts[0]  # the share's thread
        for column in range(values.shape[1]):
            out[row, column] += factor * values[row, column]


@shared_only
@pytest.mark.parametrize("dtype", [np.float32, np.uint16, np.float64])
@pytest.mark.parametrize("cuts", [[0, 7], [0, 3, 7], [0, 0, 7, 7], [0, 1, 2, 3, 4, 5, 6, 7]], ids=len)
def test_every_share_is_run_once(dtype: type, cuts: list[int]) -> None:
    values: NDArray[Any] = np.arange(7 * 5, dtype=dtype).reshape(7, 5)
    out, threads = np.zeros((7, 5)), np.full(7, -1)
    for _ in range(100):
        scale(values, 2.0, out, threads, np.asarray(cuts))
    assert np.array_equal(out, 200.0 * values)
    assert set(threads.tolist()) == {begin for begin, end in pairwise(cuts) if begin < end}


@shared_only
def test_a_team_of_fewer_threads_runs_every_share() -> None:
    """The runtime's limit on threads can be set only in its environment."""
    program = (
        "import numpy as np; from tests.engine.cpu.test_openmp import scale;"
        "out, threads = np.zeros((7, 5)), np.full(7, -1);"
        "scale(np.ones((7, 5)), 2.0, out, threads, np.arange(8)); assert (out == 2).all(), out"
    )
    subprocess.run([sys.executable, "-c", program], env=os.environ | {"OMP_THREAD_LIMIT": "2"}, check=True)


@shared_only
def test_arrays_are_not_kept() -> None:
    """Arguments are borrowed for the call: afterwards their owner holds the only reference."""
    values, out = np.ones((4, 4)), np.zeros((4, 4))
    before = [sys.getrefcount(array) for array in (values, out)]
    scale(values, 1.0, out, np.zeros(4, int), np.asarray([0, 2, 4]))
    assert [sys.getrefcount(array) for array in (values, out)] == before


@pytest.mark.parametrize(("rows", "threads"), [(16, 2), (17, 3), (100, 16)])
def test_rows_are_shared_evenly(rows: int, threads: int) -> None:
    cuts = openmp.evenly(rows, threads, least=16)
    if not openmp.AVAILABLE:
        assert cuts.tolist() == [0, rows]
        return
    sizes = np.diff(cuts)
    assert (cuts[0], cuts[-1], len(sizes)) == (0, rows, threads)
    assert sizes.max() - sizes.min() <= 1


def test_few_rows_are_not_shared() -> None:
    assert openmp.evenly(15, 4, least=16).tolist() == [0, 15]
