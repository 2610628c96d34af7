"""From a model directory to a running engine, whichever kind is asked for."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Literal

from specdec.engine.engine import Engine, UnsupportedModelError
from specdec.engine.model_directory import GRAPH, ModelDirectory, ModelDirectoryError
from specdec.engine.providers import place_of, providers

Kind = Literal["torch", "onnx"]
Dtype = Literal["float32", "bfloat16", "float16"]


def load_engine(
    kind: Kind,
    directory: ModelDirectory,
    *,
    capacity: int | None,
    threads: Sequence[int],
    dtype: Dtype | None = None,
    device: str = "cpu",
    exact: bool = False,
    compiled: bool = False,
) -> Engine:
    """ModelDirectoryError or UnsupportedModelError say in one line what is in the way. Without a `dtype` an exported
    model computes in its own, any other in float32."""
    if kind == "torch":
        import torch

        from specdec.engine.torch_engine import TorchEngine

        if device.startswith("cuda") and not torch.cuda.is_available():
            raise UnsupportedModelError(f"device {device}: torch sees no CUDA device")
        return TorchEngine(
            directory,
            capacity=capacity,
            dtype=dtype or "float32",
            device=device,
            exact=exact,
            threads=threads,
            compiled=compiled,
        )
    if compiled:
        raise UnsupportedModelError("the ONNX engine has nothing to compile")
    if dtype == "bfloat16":
        raise UnsupportedModelError("the ONNX engine computes in float32 or float16, not bfloat16")
    import onnxruntime

    from specdec.engine.onnx_engine import OnnxEngine

    providers(place_of(device), onnxruntime.get_available_providers())  # before a model is exported in vain
    if not (directory.path / GRAPH).is_file():
        if importlib.util.find_spec("torch") is None:
            raise ModelDirectoryError(
                f"{directory.path}: not exported (no {GRAPH}), and without torch it cannot be exported here: "
                "run `specdec export` where torch is installed"
            )
        from specdec.engine.export import exported

        directory = ModelDirectory(exported(directory, dtype or "float32"))
    least = min(threads)  # it cannot change their number
    return OnnxEngine(directory, capacity=capacity, threads=least, dtype=dtype, device=device)
