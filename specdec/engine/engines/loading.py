"""Loading a model directory into an engine of any kind."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from specdec.engine import cache_folder, fast_paths, hub
from specdec.engine.engine import Engine, UnsupportedModelError
from specdec.engine.model_directory import GRAPH, ModelDirectory
from specdec.engine.onnx.providers import parse_device, providers
from specdec.engine.placement import Dtype, Kind, Placement, WantedDtype
from specdec.engine.preflight.device import check_device, check_placement
from specdec.engine.preflight.dtype import dtype_of
from specdec.engine.processor import computes_bfloat16
from specdec.engine.start_phases import phase

if TYPE_CHECKING:  # imports torch
    from specdec.engine.distributed.ranks import Ranks
    from specdec.engine.hf.attention_backend import AttentionBackend


def load_engine(
    kind: Kind,
    directory: ModelDirectory,
    *,
    capacity: int | None,
    threads: Sequence[int],
    dtype: WantedDtype = "auto",
    device: str = "cpu",
    exact: bool = False,
    compiled: bool = False,
    cuda_graphs: bool = True,
    ranks: Ranks | None = None,
    vllm_options: Mapping[str, Any] | None = None,
    sessions: int | None = None,
    promised: int = 0,
) -> Engine:
    """Load a model into an engine; ModelDirectoryError or UnsupportedModelError with a one-line reason if it cannot be.

    `threads`: thread counts for an engine on the CPU, the largest first. `dtype_of` resolves "auto". `cuda_graphs`: for
    the GPU engine and vLLM; without it kernels are launched one by one. `vllm_options` and `sessions` (limit of a step)
    are for vLLM alone. `promised`: bytes of CPU memory owed to another engine of this process with lazy KV memory
    (`LazyMemory`). With `ranks`, return this rank's part of a parallel engine: on rank 0 it is used like any other
    engine, elsewhere it is a `FollowingEngine`.
    """
    placement = Placement(kind, dtype, device, compiled=compiled)
    dtype = dtype_of(directory, placement)
    if ranks is not None:
        ranks.agree(engine=kind, dtype=dtype, device=device, kv_tokens=capacity, exact=exact, compile=compiled)
    if ranks is None:
        check_placement(directory, placement)
    elif kind == "vllm":
        raise UnsupportedModelError(
            "vLLM starts its own processes: run without torchrun, with --vllm-options '{\"tensor_parallel_size\": N}'"
        )
    elif compiled or kind == "onnx":
        remedy = "leave out --compile" if compiled else "use torchrun only with the torch engine"
        raise UnsupportedModelError(
            f"{'a compiled model' if compiled else 'the ONNX engine'} runs in one process: {remedy}"
        )
    cache_folder.keep_compiled_code()
    if kind != "vllm":
        hub.stay_away()
    if kind == "onnx":
        return _onnx(directory, dtype, device, capacity=capacity, threads=min(threads))  # its thread count is fixed
    options: dict[str, Any] = {"capacity": capacity, "dtype": dtype, "exact": exact}
    if kind == "vllm":
        from specdec.engine.vllm.engine import vllm_engine

        own: dict[str, Any] = {"threads": max(threads), "compiled": compiled, "cuda_graphs": cuda_graphs}
        if sessions is not None:
            own["sessions"] = sessions
        return vllm_engine(directory, device=device, options=vllm_options or {}, **own, **options)
    if ranks is not None:
        return _part(ranks, kind, directory, device, threads=threads, **options)
    with phase("imports"):  # torch, transformers and Numba: seconds
        importlib.import_module(f"specdec.engine.engines.{'cpu_engine' if device == 'cpu' else 'torch_engine'}")
    if device == "cpu" and dtype == "bfloat16" and not computes_bfloat16():
        fast_paths.found_off("bfloat16", "this CPU has no bfloat16 arithmetic", "float32 is much faster here")
    if device == "cpu":
        options["promised"] = promised
    return _torch(kind, directory, device, threads=threads, compiled=compiled, cuda_graphs=cuda_graphs, **options)


def _torch(
    kind: Kind,
    directory: ModelDirectory,
    device: str,
    *,
    threads: Sequence[int],
    compiled: bool,
    cuda_graphs: bool,
    **options: Any,
) -> Engine:
    """Load a torch engine in one process, on a device known to torch."""
    import torch

    try:
        torch.set_num_threads(max(threads))  # used by host computations beside a GPU, too
        if device == "cpu":
            return _cpu(kind, directory, threads=threads, compiled=compiled, **options)
        if kind == "torch":
            return _gpu(directory, device, cuda_graphs=cuda_graphs, **options)
        from specdec.engine.engines.torch_engine import TorchEngine

        return TorchEngine(directory, device=device, **options)
    except torch.OutOfMemoryError as error:  # raised for GPU memory only
        reason = str(error).partition(". ")[0]  # the rest is statistics
        raise UnsupportedModelError(f"device {device}: {reason}; use a smaller model or fewer --kv-tokens") from error


def _cpu(kind: Kind, directory: ModelDirectory, *, compiled: bool, **options: Any) -> Engine:
    """Load the engine for CPUs."""
    if compiled:
        from specdec.engine.engines.compiled_engine import CompiledEngine

        return CompiledEngine(directory, **options)
    from specdec.engine.engines.cpu_engine import CpuEngine

    return CpuEngine(directory, backend=_backend(kind), **options)


def _backend(kind: Kind) -> type[AttentionBackend]:
    """Return the attention backend for a kind of torch engine on CPUs."""
    from specdec.engine.cpu.backend import RaggedBackend
    from specdec.engine.padded.backend import PaddedBackend

    return PaddedBackend if kind == "eager" else RaggedBackend


def _gpu(directory: ModelDirectory, device: str, **options: Any) -> Engine:
    """Load the engine for GPUs."""
    from specdec.engine.gpu.engine import GpuEngine

    return GpuEngine(directory, device=device, **options)


def _onnx(directory: ModelDirectory, dtype: Dtype, device: str, *, capacity: int | None, threads: int) -> Engine:
    """Load the ONNX Runtime engine; export the model first if its directory has no graph."""
    import onnxruntime

    from specdec.engine.onnx.engine import OnnxEngine

    providers(parse_device(device), onnxruntime.get_available_providers())  # fail before an export in vain
    if not (directory.path / GRAPH).is_file():
        from specdec.engine.onnx.export import exported

        directory = ModelDirectory(exported(directory, "float16" if dtype == "float16" else "float32"))
    return OnnxEngine(directory, capacity=capacity, threads=threads, device=device)


def _part(
    ranks: Ranks, kind: Kind, directory: ModelDirectory, device: str, *, threads: Sequence[int], **options: Any
) -> Engine:
    """Load this rank's part of a parallel engine."""
    from specdec.engine.engines import parallel_engine as parts

    own = ranks.together(lambda: _own_device(kind, device, ranks.local_rank))  # machines may differ
    if own == "cpu":
        cpu_part = parts.LeadingCpuEngine if ranks.rank == 0 else parts.FollowingCpuEngine
        return cpu_part(directory, ranks=ranks, threads=threads, backend=_backend(kind), **options)
    part = parts.LeadingEngine if ranks.rank == 0 else parts.FollowingEngine
    return part(directory, ranks=ranks, device=own, **options)


def _own_device(kind: Kind, device: str, local_rank: int) -> str:
    """Return the device of a rank, given its number on this machine; UnsupportedModelError if it cannot have one."""
    import torch

    if device not in ("cpu", "cuda"):
        raise UnsupportedModelError(
            f"device {device}: with torchrun give --device cuda: every process takes its own device"
        )
    if device == "cpu" and torch.accelerator.is_available():
        raise UnsupportedModelError(
            "transformers places the parts of a model on an accelerator if there is one: hide it, for example with "
            "CUDA_VISIBLE_DEVICES=, or use --device cuda"
        )
    own = f"cuda:{local_rank}" if device == "cuda" else device
    check_device(Placement(kind, device=own))
    return own
