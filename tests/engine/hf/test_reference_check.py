"""At start an engine's output is compared with the model's own; a failing engine is reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from numpy.typing import NDArray

from specdec.engine.batch import PackedBatch
from specdec.engine.gpu.layout import SplitKvPacker
from specdec.engine.hf.pretrained import load
from specdec.engine.hf.reference_check import ReferenceCheck
from specdec.engine.model_directory import WEIGHTS, ModelDirectory
from specdec.engine.model_file import ModelDirectoryError
from specdec.engine.unsupported import UnsupportedModelError
from tests.models import make

OWN = ReferenceCheck("Odd", 1e-3, [5, 6, 7, 8], [9, 4], torch.tensor([[1.0, 2.0, -8.0], [3.0, 0.5, 2.0]]))


class Engine:
    """Returns the given logits, or raises the given error."""

    def __init__(self, logits: NDArray[np.float32] | Exception) -> None:
        self._logits = logits
        self.batch: PackedBatch | None = None

    def packer(self) -> SplitKvPacker:
        return SplitKvPacker()

    def forward(self, batch: PackedBatch) -> NDArray[np.float32]:
        self.batch = batch
        if isinstance(self._logits, Exception):
            raise self._logits
        return self._logits


def check(logits: Any) -> Engine:
    engine = Engine(logits)
    OWN.check(engine)  # type: ignore[arg-type]
    return engine


def test_it_runs_a_prompt_with_a_branch_in_it() -> None:
    batch = check(OWN.logits.numpy()).batch
    assert batch is not None
    assert batch.tokens.tolist() == [5, 6, 7, 8, 9, 4]
    assert batch.positions.tolist() == [0, 1, 2, 3, 2, 3]
    assert batch.wanted.tolist() == [3, 5]


@pytest.mark.parametrize("moved", [0.1, np.nan])
def test_other_logits_are_refused(moved: float) -> None:
    check(OWN.logits.numpy() + np.float32(1e-3))
    with pytest.raises(UnsupportedModelError, match=r"^Odd: packed logits differ"):
        check(OWN.logits.numpy() + np.float32(moved))


def test_kernels_that_do_not_run_are_refused_in_one_line() -> None:
    with pytest.raises(UnsupportedModelError, match=r"^Odd cannot run .*: RuntimeError: there is no C compiler here$"):
        check(RuntimeError("there is no\n  C compiler here"))


def test_a_weight_that_is_not_finite_is_named(tmp_path: Path) -> None:
    path = make("llama", tmp_path / "model")
    weights = safetensors.torch.load_file(path / WEIGHTS)
    weights["model.norm.weight"][0] = np.nan
    safetensors.torch.save_file(weights, path / WEIGHTS, metadata={"format": "pt"})
    directory = ModelDirectory(path)
    with pytest.raises(ModelDirectoryError, match=r"model.norm.weight has numbers that are not finite"):
        ReferenceCheck.of(load(directory, torch.float32, "cpu"), directory)
