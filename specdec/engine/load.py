"""From a model directory to a running engine, whichever kind is asked for."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Literal

from specdec.engine.engine import Engine, UnsupportedModelError
from specdec.engine.model_directory import GRAPH, ModelDirectory, ModelDirectoryError

Kind = Literal["torch", "onnx"]


def load_engine(
    kind: Kind,
    directory: ModelDirectory,
    *,
    capacity: int | None,
    threads: Sequence[int],
    dtype: str = "float32",
    device: str = "cpu",
    exact: bool = False,
    compiled: bool = False,
) -> Engine:
    """ModelDirectoryError or UnsupportedModelError say in one line what is in the way."""
    if kind == "torch":
        import torch

        from specdec.engine.torch_engine import TorchEngine

        if device.startswith("cuda") and not torch.cuda.is_available():
            raise UnsupportedModelError(f"device {device}: torch sees no CUDA device")
        return TorchEngine(
            directory, capacity=capacity, dtype=dtype, device=device, exact=exact, threads=threads, compiled=compiled
        )
    if compiled:
        raise UnsupportedModelError("the ONNX engine has nothing to compile")
    if dtype != "float32":
        raise UnsupportedModelError(f"the ONNX engine computes in float32, not {dtype}")
    from specdec.engine.onnx_engine import OnnxEngine

    if not (directory.path / GRAPH).is_file():
        if importlib.util.find_spec("torch") is None:
            raise ModelDirectoryError(
                f"{directory.path}: not exported (no {GRAPH}), and without torch it cannot be exported here: "
                "run `specdec export` where torch is installed"
            )
        from specdec.engine.export import exported

        directory = ModelDirectory(exported(directory))
    return OnnxEngine(directory, capacity=capacity, threads=min(threads))  # it cannot change their number
