"""From a model directory to a running engine, whichever kind is asked for."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from specdec.engine.engine import Engine, UnsupportedModelError
from specdec.engine.model_directory import GRAPH, ModelDirectory, ModelDirectoryError

if TYPE_CHECKING:  # it brings torch
    from specdec.engine.ranks import Ranks

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
    ranks: Ranks | None = None,
) -> Engine:
    """ModelDirectoryError or UnsupportedModelError say in one line what is in the way. With `ranks`, the engine of this
    one: for rank 0 one like any other, for the rest a `FollowingEngine`."""
    if kind == "torch":
        import torch

        from specdec.engine.torch_engine import TorchEngine

        if device.startswith("cuda") and not torch.cuda.is_available():
            raise UnsupportedModelError(f"device {device}: torch sees no CUDA device")
        if ranks is not None:
            return _part(
                ranks, directory, device, compiled, capacity=capacity, dtype=dtype, exact=exact, threads=threads
            )
        return TorchEngine(
            directory, capacity=capacity, dtype=dtype, device=device, exact=exact, threads=threads, compiled=compiled
        )
    if ranks is not None:
        raise UnsupportedModelError("the ONNX engine computes in one process: torchrun is for the torch engine")
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


def _part(ranks: Ranks, directory: ModelDirectory, device: str, compiled: bool, **options: Any) -> Engine:
    """This rank's part of an engine."""
    import torch

    from specdec.engine.parallel import FollowingEngine, LeadingEngine

    if compiled:
        raise UnsupportedModelError("a model in parts cannot be compiled: leave out --compile, or torchrun")
    if device not in ("cpu", "cuda"):
        raise UnsupportedModelError(f"device {device}: under torchrun say cuda, of which every process takes its own")
    if device == "cpu" and torch.accelerator.is_available():
        raise UnsupportedModelError(
            "transformers puts the parts of a model on the accelerator where there is one: hide it, as with "
            "CUDA_VISIBLE_DEVICES=, or say --device cuda"
        )
    own = f"cuda:{ranks.local_rank}" if device == "cuda" else device
    kind = LeadingEngine if ranks.rank == 0 else FollowingEngine
    return kind(directory, ranks=ranks, device=own, **options)
