"""Loading a model directory into an engine of any kind."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from specdec.engine import cache_folder, fast_paths, hub
from specdec.engine.engine import Engine
from specdec.engine.model_directory import GRAPH, ModelDirectory
from specdec.engine.onnx.providers import parse_device, providers
from specdec.engine.placement import BITS, Dtype, Kind, Placement
from specdec.engine.preflight.device import check_placement
from specdec.engine.preflight.dtype import dtype_of
from specdec.engine.processor import computes_bfloat16
from specdec.engine.shortage import within_gpu_memory
from specdec.engine.start_phases import phase


def load_engine(
    directory: ModelDirectory,
    placement: Placement,
    *,
    threads: Sequence[int],
    exact: bool = False,
    cuda_graphs: bool = True,
    vllm_options: Mapping[str, Any] | None = None,
    promised: int = 0,
    promised_a_slot: int = 0,
) -> Engine:
    """Load a model into an engine; ModelDirectoryError or UnsupportedModelError, with a one-line reason, if impossible.

    `threads`: thread counts for an engine on the CPU, the largest first. `cuda_graphs`: use CUDA graphs in the GPU
    engine and vLLM; without them kernels are launched one by one. `promised`: device bytes that other parts of this
    process will still allocate, such as heads, or an engine with lazy KV memory (`LazyMemory`). `promised_a_slot`:
    bytes that these parts take per slot of the KV cache. The ONNX engine and vLLM ignore both.
    """
    kind, device = placement.kind, placement.device
    dtype = dtype_of(directory, placement)
    check_placement(directory, placement)
    cache_folder.keep_compiled_code()
    options: dict[str, Any] = {"capacity": placement.kv_tokens, "dtype": dtype, "exact": exact}
    owed = {"promised": promised, "promised_a_slot": promised_a_slot}
    if kind == "vllm":
        from specdec.engine.vllm.engine import vllm_engine

        own: dict[str, Any] = {"threads": max(threads), "compiled": placement.compiled, "cuda_graphs": cuda_graphs}
        if placement.sessions is not None:
            own["sessions"] = placement.sessions
        return vllm_engine(directory, device=device, options=vllm_options or {}, **own, **options)
    hub.disable()
    if kind == "onnx":
        return _onnx(directory, placement, dtype, threads=min(threads))  # this engine's thread count is fixed
    if device == "cpu":
        options |= {"threads": threads, "bits": BITS[placement.weights]}
        if dtype == "bfloat16" and not computes_bfloat16():
            fast_paths.found_off("bfloat16", "this CPU has no bfloat16 arithmetic", "float32 is much faster here")
    elif kind == "torch":
        options["cuda_graphs"] = cuda_graphs
    return _torch(kind, directory, device, max(threads), options | owed)


def _torch(kind: Kind, directory: ModelDirectory, device: str, threads: int, options: dict[str, Any]) -> Engine:
    """Load a torch engine, on a device known to torch."""
    with phase("imports"):  # torch, transformers and Numba; takes seconds
        importlib.import_module(f"specdec.engine.engines.{'cpu_engine' if device == 'cpu' else 'torch_engine'}")
    import torch

    with within_gpu_memory(f"device {device}", "use a smaller model or fewer --kv-tokens"):
        torch.set_num_threads(threads)  # used by host computations beside a GPU, too
        if device == "cpu":
            from specdec.engine.cpu.backend import RaggedBackend
            from specdec.engine.engines.cpu_engine import CpuEngine
            from specdec.engine.padded.backend import PaddedBackend

            return CpuEngine(directory, backend=PaddedBackend if kind == "eager" else RaggedBackend, **options)
        if kind == "torch":
            from specdec.engine.gpu.engine import GpuEngine

            return GpuEngine(directory, device=device, **options)
        from specdec.engine.engines.torch_engine import TorchEngine

        return TorchEngine(directory, device=device, **options)


def _onnx(directory: ModelDirectory, placement: Placement, dtype: Dtype, threads: int) -> Engine:
    """Load the ONNX Runtime engine; export the model first if its directory has no graph."""
    from specdec.engine.onnx.engine import OnnxEngine
    from specdec.engine.onnx_runtime import ort

    providers(parse_device(placement.device), ort.get_available_providers())  # fail before a useless export
    if not (directory.path / GRAPH).is_file():
        from specdec.engine.onnx.first_use import exported

        in_dtype: Literal["float16", "float32"] = "float16" if dtype == "float16" else "float32"
        directory = ModelDirectory(exported(directory, in_dtype, quantised=placement.may_quantise))
    return OnnxEngine(directory, capacity=placement.kv_tokens, threads=threads, device=placement.device)
