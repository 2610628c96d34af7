"""Weights that are not finite are found, in every format that stores numbers."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import safetensors.torch
import torch

from specdec.engine.model_directory import WEIGHTS, ModelDirectory
from specdec.engine.model_file import ModelDirectoryError
from specdec.engine.preflight.finite_weights import PIECE_BYTES, check_finite
from tests.models import make


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> ModelDirectory:
    return ModelDirectory(make("llama", tmp_path_factory.mktemp("models") / "model"))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_one_bad_number_is_found(directory: ModelDirectory, dtype: torch.dtype, value: float) -> None:
    tensors = {name: torch.full((5, 7), 3.0, dtype=dtype) for name in ("a.weight", "b.weight")}
    file = directory.path / WEIGHTS
    safetensors.torch.save_file(tensors, file)
    check_finite(directory)
    tensors["b.weight"][4, 6] = value
    safetensors.torch.save_file(tensors, file)
    with pytest.raises(ModelDirectoryError, match=r"^.*/model.safetensors: b.weight has numbers that are not finite$"):
        check_finite(directory)


def test_the_largest_and_smallest_numbers_are_finite(directory: ModelDirectory) -> None:
    def extremes(dtype: torch.dtype) -> torch.Tensor:
        limits = torch.finfo(dtype)
        return torch.tensor([limits.max, limits.min, limits.tiny, 0.0], dtype=dtype)

    kinds = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    safetensors.torch.save_file({str(kind): extremes(kind) for kind in kinds}, directory.path / WEIGHTS)
    check_finite(directory)


def test_whole_numbers_are_not_looked_at(directory: ModelDirectory) -> None:
    """Their bits may be those of a NaN."""
    quantised = torch.full((4, 4), -1, dtype=torch.int32)
    safetensors.torch.save_file({"a.qweight": quantised, "empty": torch.zeros(0)}, directory.path / WEIGHTS)
    check_finite(directory)


def test_a_tensor_larger_than_a_piece(directory: ModelDirectory) -> None:
    """Bad numbers are found in its first and in its last piece."""
    count = PIECE_BYTES // 4 + 1000
    for place in (0, count - 1):
        numbers = torch.ones(count)
        numbers[place] = math.nan
        safetensors.torch.save_file({"a": numbers}, directory.path / WEIGHTS)
        with pytest.raises(ModelDirectoryError, match="not finite"):
            check_finite(directory)


def test_a_truncated_file_is_told(directory: ModelDirectory) -> None:
    file: Path = directory.path / WEIGHTS
    safetensors.torch.save_file({"a": torch.ones(1000)}, file)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ModelDirectoryError, match=r"model.safetensors: has \d+ bytes, must have \d+ by its header"):
        check_finite(directory)
