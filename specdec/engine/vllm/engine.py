"""The vLLM engine: vLLM's models, kernels and executors behind the interface of all engines.

vLLM loads a model, in any quantisation it supports, on one device or with tensor parallelism. It runs passes over the
rows that the verifier's step loop packs. Scheduling, memory, prefix caching and sampling remain ours, so texts are
treated as with any other engine.
"""

from __future__ import annotations

import atexit
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import numpy as np
import structlog
from numpy.typing import NDArray

from specdec.decoding.block_verification import AcceptedPrefix, ChainQuery
from specdec.decoding.choice import Tokens
from specdec.decoding.logprobs import TokenLogprobs
from specdec.decoding.query import SamplingQuery
from specdec.decoding.typical import TypicalQuery
from specdec.engine.batch import PackedBatch
from specdec.engine.batch_independence import long_rows_are_independent, rows_are_independent
from specdec.engine.kv.blocks import BLOCK
from specdec.engine.kv.slots import PADDING_SLOT, Slots
from specdec.engine.memory import slots_for
from specdec.engine.model_directory import ModelDirectory
from specdec.engine.placement import BYTES, Dtype, Placement
from specdec.engine.preflight.memory_needed import memory_needed, numbers_of_a_token
from specdec.engine.preflight.vllm_version import check_build, check_vllm
from specdec.engine.start_phases import phase
from specdec.engine.unsupported import UnsupportedModelError
from specdec.engine.vllm.layout import BlockPacker
from specdec.engine.vllm.options import MAX_ROWS, MAX_SEQUENCES, MIN_SEQUENCES, check_options
from specdec.exit_status import ExitStatus

log = structlog.get_logger()

ENVIRONMENT = {
    "VLLM_CONFIGURE_LOGGING": "0",  # its log lines go where the service's own go
    "VLLM_CPU_ATTN_SPLIT_KV": "0",  # a split of keys that depends on the batch would change bits
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # a model on one device runs in this process
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # `worker.py` is written for the first version
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # this process has threads, and has initialised the CUDA driver
}
"""Environment variables read by vLLM on import."""

KERNEL_VARIABLES = {"VLLM_TUNED_CONFIG_FOLDER", "VLLM_FLASHINFER_AUTOTUNE_SKIP_OPS"}
"""Variables that select vLLM's kernels without changing its graphs."""


class VllmEngine:
    """A model in vLLM, and its KV cache.

    `capacity` is in slots; None: sized by free memory. A pass has rows of at most `sessions` texts, or of MIN_SEQUENCES
    if that is more. CPUs compute with `threads` threads.

    `compiled` uses torch.compile for the layers on CPUs; without `cuda_graphs` a GPU's kernels are launched one by one.
    `options` are vLLM's own (`vllm.EngineArgs`), such as tensor_parallel_size. The parameter `exact` requests the check
    that rows do not depend on their batch; the attribute `exact` is its outcome.
    """

    chains_only = True
    threads: tuple[int, ...] = ()

    def __init__(
        self,
        directory: ModelDirectory,
        *,
        capacity: int | None,
        threads: int,
        dtype: Dtype,
        device: str = "cpu",
        exact: bool = True,
        compiled: bool = False,
        cuda_graphs: bool = True,
        sessions: int = MAX_SEQUENCES,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        check_vllm()
        options = dict(options or {})
        check_options(options)
        if device not in ("cpu", "cuda"):
            raise UnsupportedModelError(
                f"device {device}: vLLM uses all visible devices: give --device cuda, and select by "
                "CUDA_VISIBLE_DEVICES"
            )
        with phase("imports"):
            os.environ.update(ENVIRONMENT)
            import torch
            import vllm
            from vllm.platforms import current_platform

            from specdec.engine.hf.fingerprint import device_kind
        check_build(device, for_cpus=current_platform.is_cpu())
        self._set_threads = partial(torch.set_num_threads, threads)  # the original function: vLLM replaces it
        self._thread = 0  # ident of the last computing thread: torch's thread count is per thread
        self._compute_here()
        memory = memory_options(directory, capacity, dtype, device, options)
        parts = options.get("tensor_parallel_size", 1)
        sequences = max(MIN_SEQUENCES, sessions)
        of_parts = {"OMP_NUM_THREADS": str(max(1, threads // parts))} if device == "cpu" and parts > 1 else {}
        with phase("weights"), environment(of_parts):
            self._start = _started(
                model=str(directory.path),
                dtype=dtype,
                load_format="safetensors",
                skip_tokenizer_init=True,
                block_size=BLOCK,
                max_num_batched_tokens=MAX_ROWS,
                max_num_seqs=sequences,
                enable_prefix_caching=False,
                disable_hybrid_kv_cache_manager=True,
                async_scheduling=False,
                language_model_only=True,
                enforce_eager=not (compiled if device == "cpu" else cuda_graphs),
                worker_extension_cls="specdec.engine.vllm.worker.Passes",
                **memory | options,
            )
        told = self._call("specdec_describe")
        if isinstance(told, str):
            raise UnsupportedModelError(f"{directory.name} does not run here with vLLM: {told}")
        size, blocks, self.longest_text, attention = told
        self.capacity = blocks * size // BLOCK * BLOCK
        self.vocabulary = directory.vocabulary
        self.device, self.dtype = device, dtype
        self._has_tokens_apart = self._keeps_tokens_apart()
        with phase("exactness"):
            self.exact = (
                exact
                and rows_are_independent(self, most_texts=sequences)
                and long_rows_are_independent(self, self.longest_text)
            )
        on_cpu = ["compiled" if compiled else "layers", f"{threads}-threads"]
        where = on_cpu if device == "cpu" else ["graphs" if cuda_graphs else "layers"]
        self.numerics = "/".join(
            (
                f"vllm-{vllm.__version__}",
                f"torch-{torch.__version__}",
                device_kind(device),
                dtype,
                attention,
                *([json.dumps(options, sort_keys=True)] if options else []),  # any of them may affect numerics
                *_variables(),
                *where,
                "exact" if self.exact else "fast",
            )
        )

    def packer(self) -> BlockPacker:
        return BlockPacker()

    def forward(self, batch: PackedBatch) -> NDArray[np.float32]:
        self._compute_here()
        self._call("specdec_step", batch)
        logits: NDArray[np.float32] = self._call("specdec_logits")
        return logits

    def copy(self, source: Slots, target: Slots) -> None:
        """Copy keys and values, by whole blocks. Source and target slots must have the same offsets in their blocks;
        the rest of a target block is overwritten as well, and must be unused. A copy from the padding slot writes
        zeros, also to single slots."""
        clears = source == PADDING_SLOT
        if clears.any():
            self._clear(target[clears])
        source, target = source[~clears], target[~clears]
        if (source % BLOCK != target % BLOCK).any():
            raise ValueError("slots are copied by whole blocks")
        pairs = np.unique(np.stack([source // BLOCK, target // BLOCK]), axis=1)
        if pairs.size:
            self._call("specdec_copy", [tuple(pair) for pair in pairs.T.tolist()])

    def _clear(self, slots: Slots) -> None:
        _, counts = np.unique(slots // BLOCK, return_counts=True)
        if not self._has_tokens_apart and (counts < BLOCK).any():
            raise RuntimeError("this attention mixes the tokens of a block, so single tokens cannot be cleared")
        self._call("specdec_clear", slots)

    def _keeps_tokens_apart(self) -> bool:
        """Return whether the memory of a block keeps each token's keys and values separate from other tokens'."""
        keys, packer = BLOCK + np.arange(6), self.packer()
        packer.add_path(keys, [packer.add_row(0, 5, int(keys[5]))])
        packer.want(0)
        self.forward(packer.pack())
        found: list[int] = self._call("specdec_written", 1)
        self._call("specdec_clear", BLOCK + np.arange(BLOCK))
        return found == [5]

    def _call(self, method: str, *given: Any) -> Any:
        return self._start(method, *given)()

    def _compute_here(self) -> None:
        """Set the engine's thread count for the calling thread."""
        if self._thread != threading.get_ident():
            self._thread = threading.get_ident()
            self._set_threads()


class SamplingVllmEngine(VllmEngine):
    """A vLLM engine with logits on a GPU or in another process: they stay there; only tokens are fetched."""

    def launch(self, batch: PackedBatch) -> WorkerPass:
        """Launch a forward pass on the device or the tensor-parallel workers."""
        self._compute_here()
        return WorkerPass(self._start, self._call, self._start("specdec_step", batch))


@dataclass(frozen=True)
class WorkerPass:
    """A forward pass of vLLM's workers. `passed` waits for it."""

    start: Start
    call: Callable[..., Any]
    passed: Callable[[], Any]

    def logits(self, asked: Callable[[], Mapping[int, SamplingQuery]]) -> WorkerLogits:
        queries = asked()
        chosen = self.start("specdec_ask", "choose", list(queries), list(queries.values())) if queries else None
        self.passed()
        logits = WorkerLogits(self.call)
        if chosen is not None:
            logits.know(queries, *chosen())
        return logits


class WorkerLogits:
    """Step logits kept by a vLLM worker until its next pass."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._ask = partial(call, "specdec_ask")
        self._known: dict[int, tuple[int, bool]] = {}  # row -> token, and whether the row is sound

    def know(self, rows: Iterable[int], tokens: Tokens, sound: NDArray[np.bool_]) -> None:
        """Keep the choices of these rows."""
        self._known.update(zip(rows, zip(tokens.tolist(), sound.tolist(), strict=True), strict=True))

    def choose(self, rows: Sequence[int], queries: Sequence[SamplingQuery]) -> tuple[Tokens, NDArray[np.bool_]]:
        unknown = {row: query for row, query in zip(rows, queries, strict=True) if row not in self._known}
        if unknown:
            self.know(unknown, *self._ask("choose", list(unknown), list(unknown.values())))
        chosen, are_sound = zip(*(self._known[row] for row in rows), strict=True)
        return np.array(chosen, dtype=np.int64), np.array(are_sound, dtype=np.bool_)

    def plausible(self, rows: Sequence[int], queries: Sequence[SamplingQuery]) -> list[Tokens]:
        found: list[Tokens] = self._ask("plausible", list(rows), list(queries))
        return found

    def verify_chains(self, chains: Sequence[ChainQuery]) -> list[AcceptedPrefix]:
        accepted: list[AcceptedPrefix] = self._ask("verify_chains", list(chains))
        return accepted

    def accept_typical(self, queries: Sequence[TypicalQuery]) -> list[list[int]]:
        accepted: list[list[int]] = self._ask("accept_typical", list(queries))
        return accepted

    def logprobs(self, rows: Sequence[int], tokens: Tokens, tops: Sequence[int]) -> list[TokenLogprobs]:
        found: list[TokenLogprobs] = self._ask("logprobs", list(rows), tokens, list(tops))
        return found


def vllm_engine(directory: ModelDirectory, *, device: str, options: Mapping[str, Any], **rest: Any) -> VllmEngine:
    """Load a model. Its logits are in this process's memory only on a CPU without tensor parallelism."""
    here = device == "cpu" and options.get("tensor_parallel_size", 1) == 1
    return (VllmEngine if here else SamplingVllmEngine)(directory, device=device, options=options, **rest)


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for processes started inside the context."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _variables() -> list[str]:
    """Return the user-set vLLM environment variables that may change bits: the ones in vLLM's cache key for compiled
    graphs, and the ones that select kernels."""
    from vllm import envs

    names = envs.compile_factors().keys() | KERNEL_VARIABLES
    set_by_user = os.environ.keys() - ENVIRONMENT.keys()
    return [f"{name}={os.environ[name]}" for name in sorted(names & set_by_user) if name.startswith("VLLM_")]


Start = Callable[..., Callable[[], Any]]
"""Starts a method on all workers; returns a function that waits for it and returns rank 0's result."""


def _started(**arguments: Any) -> Start:
    """Start vLLM with these engine arguments; return the function that calls its workers."""
    from vllm import EngineArgs, envs
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor.abstract import Executor

    try:
        config = EngineArgs(**arguments).create_engine_config()
        core = EngineCore(config, Executor.get_class(config), log_stats=False, executor_fail_callback=_lost)
    except Exception as error:  # of many kinds; if workers fail to start, it is generic
        raise UnsupportedModelError(f"vLLM rejects the model or its options: {reason_of(error)}") from error
    atexit.register(core.shutdown)
    call_all: Callable[..., Any] = core.model_executor.collective_rpc

    def start_one(method: str, *given: Any) -> Callable[[], Any]:
        """Call the worker in this process, synchronously, so that nothing after a failed call is started."""
        (answer,) = call_all(method, args=given)
        return lambda: answer

    def start(method: str, *given: Any) -> Callable[[], Any]:
        answers = call_all(method, envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS, given, non_block=True)

        def wait() -> Any:
            try:
                return answers.result()[0]
            except Exception:
                # Workers compute together. After one fails, the others may have gone on, or wait for it forever, so
                # the next pass would add up mismatched parts.
                _lost()

        return wait

    return start_one if config.parallel_config.world_size == 1 else start


def _lost() -> NoReturn:
    """End the process after a worker has failed, died or hung: a lost part of a model cannot be restored."""
    log.critical("vllm_worker_lost", exc_info=True)
    os._exit(ExitStatus.INTERNAL)


def reason_of(error: Exception) -> str:
    """Return the message of a vLLM error in one line; for a failed configuration check, its third line. Errors about
    memory also name our option for it."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    told = lines[2] if "validation error" in lines[0] and len(lines) > 2 else lines[0]
    told = told.strip().partition(" [type=")[0].removeprefix("Value error, ")
    if "out of memory" in told.lower():
        return f"{told.partition('. ')[0].rstrip('.')}: use fewer --kv-tokens, or --no-cuda-graphs"
    return f"{told.rstrip('.')}, or use fewer --kv-tokens" if "kv cache" in told.lower() else told


def memory_options(
    directory: ModelDirectory, capacity: int | None, dtype: Dtype, device: str, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return vLLM's options for a KV cache of `capacity` slots, and for the longest text that fits. Without `capacity`,
    vLLM sizes the cache on a GPU. On a CPU it is sized here, because vLLM would take nearly all memory."""
    slot = numbers_of_a_token(directory) * BYTES[dtype]
    if capacity is None and device == "cpu" and slot and "kv_cache_memory_bytes" not in options:
        weights = memory_needed(directory, Placement("vllm", dtype)).weights  # not loaded yet
        capacity = slots_for(slot, directory.context, "cpu", promised=weights)
    if capacity is None:
        return {"max_model_len": -1}
    blocks = capacity // BLOCK
    found = {"num_gpu_blocks_override": blocks, "max_model_len": min(directory.context, (blocks - 1) * BLOCK)}
    if slot or device != "cpu":
        # On a GPU `num_gpu_blocks_override` determines the size of the KV cache, and any number of bytes will do.
        # Without `kv_cache_memory_bytes`, vLLM first profiles graphs, with another KV cache of up to 32,768 tokens.
        found["kv_cache_memory_bytes"] = max(1, blocks * BLOCK * slot // options.get("tensor_parallel_size", 1))
    return found
