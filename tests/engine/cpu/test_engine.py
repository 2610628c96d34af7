"""The engine on CPU threads: their number can be changed, and no bit depends on it."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from specdec.engine.cpu.backend import RaggedBackend
from specdec.engine.engine import cpu_threads
from specdec.engine.engines.cpu_engine import CpuEngine
from specdec.engine.engines.torch_engine import TorchEngine
from specdec.engine.hf.fingerprint import ARITHMETIC
from specdec.engine.model_directory import ModelDirectory
from tests.models import make


class Noted(CpuEngine):
    """Records its thread counts."""

    def use_threads(self, count: int) -> None:
        self.__dict__.setdefault("used", []).append(count)
        super().use_threads(count)


@pytest.fixture
def directory(tmp_path: Path) -> ModelDirectory:
    return ModelDirectory(make("llama", tmp_path / "llama"))


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.verify)])
def test_keys_and_values_begin_with_a_page_and_are_zeros(directory: ModelDirectory, dtype: str) -> None:
    engine = CpuEngine(directory, capacity=512, dtype=dtype, threads=(1,), exact=False)
    assert isinstance(engine._backend, RaggedBackend)
    for pools in (engine._backend._memory.keys, engine._backend._memory.values):
        assert isinstance(pools, torch.Tensor)
        assert pools.data_ptr() % mmap.PAGESIZE == 0
        assert not pools[:, :, -64:].any()  # unused slots
    engine.touch_memory()


def test_exactness_is_checked_with_every_number_of_threads(directory: ModelDirectory) -> None:
    before = torch.get_num_threads()
    try:
        engine = Noted(directory, capacity=256, threads=(2, 1, 2))
        assert cpu_threads(engine) is engine
        assert engine.threads == (2, 1)
        assert "threads-2-1" in engine.numerics.split("/")
        assert engine.numerics.startswith(f"{ARITHMETIC}/torch-")
        if engine.exact:
            used = vars(engine)["used"]  # twice on a first start, which stores the bits for later ones
            assert used in ([1, 2], [1, 2, 1, 2])
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_without_counts_it_has_what_torch_has(directory: ModelDirectory) -> None:
    count = torch.get_num_threads()
    engine = CpuEngine(directory, capacity=256, exact=False)
    assert engine.threads == (count,)
    assert f"threads-{count}" in engine.numerics.split("/")


def test_a_torch_engine_as_on_a_gpu_says_nothing_of_threads(directory: ModelDirectory) -> None:
    engine = TorchEngine(directory, capacity=256, exact=False)
    assert cpu_threads(engine) is None
    assert "threads" not in engine.numerics
