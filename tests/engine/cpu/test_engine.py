"""The engine on CPU threads: their number can be changed, and no bit depends on it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specdec.engine.engine import cpu_threads
from specdec.engine.engines.cpu_engine import CpuEngine
from specdec.engine.engines.torch_engine import TorchEngine
from specdec.engine.model_directory import ModelDirectory
from tests.models import make


class Noted(CpuEngine):
    """Notes the numbers of threads that it is told to use."""

    def use_threads(self, count: int) -> None:
        self.__dict__.setdefault("used", []).append(count)
        super().use_threads(count)


@pytest.fixture
def directory(tmp_path: Path) -> ModelDirectory:
    return ModelDirectory(make("llama", tmp_path / "llama"))


def test_exactness_is_checked_with_every_number_of_threads(directory: ModelDirectory) -> None:
    before = torch.get_num_threads()
    try:
        engine = Noted(directory, capacity=256, threads=(2, 1, 2))
        assert cpu_threads(engine) is engine
        assert engine.threads == (2, 1)
        assert "threads-2-1" in engine.numerics.split("/")
        if engine.exact:
            assert vars(engine)["used"] == [1, 2]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_without_counts_it_has_what_torch_has(directory: ModelDirectory) -> None:
    count = torch.get_num_threads()
    engine = CpuEngine(directory, capacity=256, exact=False)
    assert engine.threads == (count,)
    plain = TorchEngine(directory, capacity=256, exact=False)
    assert cpu_threads(plain) is None
    assert f"threads-{count}" in plain.numerics.split("/")
    assert plain.numerics == engine.numerics
