"""Obstacles to loading an engine are reported in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specdec.engine.engines.loading import load_engine
from specdec.engine.model_directory import ModelDirectory
from specdec.engine.placement import Kind, Placement
from specdec.engine.unsupported import UnsupportedModelError
from tests.models import make


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("llama", tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        ("abacus", "cpu, cuda and cuda:N are supported"),
        ("meta", "cpu, cuda and cuda:N are supported"),
        ("cuda:99", "(torch .* is a CPU build|there (are|is)|the CUDA driver)"),
    ],
)
@pytest.mark.parametrize("kind", ["torch", "eager"])
def test_a_device_that_is_not_there(llama: Path, kind: Kind, device: str, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"^device {device}: {reason}"):
        load_engine(ModelDirectory(llama), Placement(kind, device=device), threads=(1,))


class TooLarge(ModelDirectory):
    """A model too large for the GPU."""

    def weights(self) -> list[Path]:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has little. Of the rest ..."
        )


def test_a_model_for_which_there_is_no_memory(llama: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"^device cpu: CUDA out of memory; .*--kv-tokens") as refused:
        load_engine(TooLarge(llama), Placement(kv_tokens=256), threads=(1,))
    assert "Of the rest" not in str(refused.value)
