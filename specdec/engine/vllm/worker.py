"""Forward passes over block batches inside vLLM's workers, using vLLM's model runner.

Most knowledge of vLLM's internals is in this file; the rest is in `fit.py`, and in `engine.py`, which starts vLLM.
`preflight/vllm_version.py` lists the supported versions. A pass does what the runner's `execute_model` does, without
its request states and its sampler: it fills the runner's buffers, builds the attention's metadata, and runs the model,
as a CUDA graph if there is one.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.config import CUDAGraphMode
from vllm.distributed import get_tp_group
from vllm.forward_context import set_forward_context
from vllm.utils.torch_utils import current_stream
from vllm.v1.worker.utils import copy_kv_cache_blocks_inplace

from specdec.decoding.step_logits import HostLogits, StepLogits
from specdec.engine.gpu.sampler import GpuLogits
from specdec.engine.gpu.staging import upload
from specdec.engine.kv.blocks import BLOCK
from specdec.engine.kv.slots import Slots
from specdec.engine.vllm.fit import rope_factors, why_unfit
from specdec.engine.vllm.layout import BlockBatch

Method = TypeVar("Method", bound=Callable[..., Any])


def on_the_stream(method: Method) -> Method:
    """Decorate a method to compute in inference mode and, on a GPU, on the stream that vLLM loaded the model on. Passes
    run in another thread, where vLLM would create a new stream, with its own memory and without the workspaces of
    quantised layers."""

    @torch.inference_mode()
    @wraps(method)
    def run(self: Passes, *given: Any) -> Any:
        if self.model_runner.device.type == "cuda":
            torch.cuda.set_stream(self._specdec_stream)
        return method(self, *given)

    return cast("Method", run)


class Passes:
    """Methods added to each vLLM worker (`worker_extension_cls`). They are called on all workers of a model
    concurrently. Rank 0 has the logits and returns results; the others return None."""

    model_runner: Any
    _specdec_stream: Any  # stream of the thread that loaded the model
    _specdec_logits: Tensor  # of the last pass [n, vocabulary]
    _specdec_rows: StepLogits  # the same logits, to answer queries from

    def specdec_describe(self) -> tuple[int, int, int, str] | str:
        """Return vLLM's block size in tokens, the number of blocks, the length of the longest text in tokens, and the
        attention implementation (for the numerics fingerprint); or the reason why the model cannot run."""
        _outlive_signals()
        self._specdec_stream = current_stream()
        runner = self.model_runner
        if (why := why_unfit(runner)) is not None:
            return why
        attention = [runner.attn_groups[0][0].backend.get_name().lower(), *rope_factors(runner.get_model())]
        config = runner.kv_cache_config
        return runner.cache_config.block_size, config.num_blocks, runner.max_model_len, "/".join(attention)

    @on_the_stream
    def specdec_step(self, batch: BlockBatch) -> None:
        """Run a forward pass and keep its logits until the next one. A GPU may still be computing on return."""
        for kept in ("_specdec_logits", "_specdec_rows"):  # the pass needs their memory
            vars(self).pop(kept, None)
        logits = _logits(self.model_runner, batch)
        if logits is None or get_tp_group().rank_in_group:
            return
        self._specdec_logits = logits.float()
        if logits.device.type == "cpu":
            self._specdec_rows = HostLogits(self._specdec_logits.numpy())
        else:
            self._specdec_rows = GpuLogits(self._specdec_logits, {})

    @on_the_stream
    def specdec_ask(self, method: str, *given: Any) -> Any:
        """Call this method of `StepLogits` on the last pass's logits."""
        return None if get_tp_group().rank_in_group else getattr(self._specdec_rows, method)(*given)

    @on_the_stream
    def specdec_logits(self) -> NDArray[np.float32] | None:
        """Return the last pass's logits [n, vocabulary]."""
        return None if get_tp_group().rank_in_group else np.asarray(self._specdec_logits.cpu().numpy())

    @on_the_stream
    def specdec_copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy keys and values in whole blocks, given (source, target) pairs."""
        runner = self.model_runner
        sources, targets = (_of_runner(runner, np.asarray(blocks)).tolist() for blocks in zip(*pairs, strict=True))
        copy_kv_cache_blocks_inplace(
            runner.kv_caches, runner.kv_cache_config.num_blocks, list(zip(sources, targets, strict=True))
        )

    @on_the_stream
    def specdec_clear(self, slots: Slots) -> None:
        """Zero keys and values, of whole blocks or single tokens."""
        for cache in self.model_runner.kv_caches:  # [blocks, heads, tokens, numbers]
            places = np.divmod(slots, self._specdec_tokens_in(cache))
            blocks, tokens = (torch.from_numpy(indices).to(cache.device) for indices in places)
            cache[blocks, :, tokens] = 0

    @on_the_stream
    def specdec_written(self, block: int) -> list[int]:
        """Return the places in a block whose tokens have a non-zero key or value in any layer."""
        found: set[int] = set()
        for cache in self.model_runner.kv_caches:
            size = self._specdec_tokens_in(cache)
            tokens = cache[block * BLOCK // size : (block + 1) * BLOCK // size].transpose(1, 2).flatten(0, 1)
            found |= set(tokens.flatten(1).ne(0).any(dim=1).nonzero().flatten().tolist())
        return sorted(found)

    def _specdec_tokens_in(self, cache: Tensor) -> int:
        """Return the tokens per block of a layer's cache, since kernels may use smaller blocks than vLLM."""
        config = self.model_runner.kv_cache_config
        size: int = self.model_runner.cache_config.block_size * config.num_blocks // cache.shape[0]
        return size


def _outlive_signals() -> None:
    """Ignore signals in a worker process, leaving them to its parent. A terminal or supervisor signals all processes
    together, but workers are needed until the texts are drained. They stop when vLLM's pipe closes."""
    if multiprocessing.parent_process() is not None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)


def _logits(runner: Any, batch: BlockBatch) -> Tensor | None:
    """Run a forward pass; return the wanted rows' logits [n, vocabulary] on the device, None if the worker has none."""
    count, sequences, counts = len(batch.tokens), len(batch.lengths), np.diff(batch.starts)
    if count > runner.max_num_tokens or sequences > runner.max_num_reqs:
        raise ValueError(
            f"the step has {count} rows in {sequences} sequences, must have at most {runner.max_num_tokens} in "
            f"{runner.max_num_reqs}"
        )
    with runner.synchronize_input_prep():
        _fill(runner, batch)
        longest = int(counts.max())
        mode, padded, _, across, _ = runner._determine_batch_execution_and_padding(
            num_tokens=count,
            num_reqs=sequences,
            num_scheduled_tokens_np=counts,
            max_num_scheduled_tokens=longest,
            allow_microbatching=False,
        )
        whole_graph = mode == CUDAGraphMode.FULL
        rows = padded.num_tokens
        tables = sequences if padded.num_reqs is None else padded.num_reqs
        # Backends that write keys outside attention also write them for padding rows.
        beside = not all(group.backend.forward_includes_kv_cache_update for group in runner.attn_groups[0])
        in_attention, in_layers = runner._get_slot_mappings(
            num_tokens_padded=rows if whole_graph or beside else count,
            num_reqs_padded=tables if whole_graph or beside else sequences,
            num_tokens_unpadded=count,
        )
        attention, _ = runner._build_attention_metadata(
            num_tokens=count,
            num_tokens_padded=rows if whole_graph else None,
            num_reqs=sequences,
            num_reqs_padded=tables if whole_graph else None,
            max_query_len=longest,
            slot_mappings=in_attention,
        )
    with set_forward_context(
        attention,
        runner.vllm_config,
        num_tokens=rows,
        num_tokens_across_dp=across,
        cudagraph_runtime_mode=mode,
        batch_descriptor=padded,
        slot_mapping=in_layers,
        is_padding=runner._prepare_padding_mask(count, rows),
    ):
        hidden = runner._model_forward(
            input_ids=runner.input_ids.gpu[:rows],
            positions=runner.positions[:rows],
            intermediate_tensors=None,
            inputs_embeds=None,
        )
    if not len(batch.wanted):
        # Nothing of this pass will be fetched, so wait for it here, before the next one overwrites its buffers.
        if hidden.device.type != "cpu":
            torch.accelerator.synchronize()
        nothing: Tensor = hidden.new_empty((0, runner.model_config.get_vocab_size()))
        return nothing
    wanted = upload(batch.wanted, runner.device)
    logits: Tensor | None = runner.model.compute_logits(hidden[wanted])
    return logits


def _fill(runner: Any, batch: BlockBatch) -> None:
    """Write a batch into the buffers that the runner's metadata and graphs read."""
    count, sequences = len(batch.tokens), len(batch.lengths)
    runner.input_ids.np[:count] = batch.tokens
    runner.input_ids.copy_to_gpu(count)
    runner.positions[:count] = upload(batch.positions, runner.device)
    runner.query_start_loc.np[: sequences + 1] = batch.starts
    runner.query_start_loc.np[sequences + 1 :] = batch.starts[-1]  # must not decrease
    runner.query_start_loc.copy_to_gpu()
    runner.optimistic_seq_lens_cpu[:sequences] = torch.from_numpy(batch.lengths)
    runner.optimistic_seq_lens_cpu[sequences:] = 0
    runner.seq_lens.copy_(runner.optimistic_seq_lens_cpu, non_blocking=True)
    inputs = runner.input_batch
    inputs.num_computed_tokens_cpu[:sequences] = batch.lengths - np.diff(batch.starts)
    inputs.num_prompt_tokens_cpu_tensor[:sequences] = 0  # the metadata treats every sequence as past its prompt
    blocks = _of_runner(runner, batch.tables)
    inputs.block_table[0].block_table.np[:sequences, : blocks.shape[1]] = blocks
    inputs.block_table.commit_block_table(sequences)
    inputs.block_table.compute_slot_mapping(
        sequences, runner.query_start_loc.gpu[: sequences + 1], runner.positions[:count]
    )


def _of_runner(runner: Any, blocks: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """Return the runner's blocks [..., n * parts] for our blocks [..., n], since the runner's may be smaller."""
    parts = BLOCK // runner.cache_config.block_size
    found: NDArray[np.int64] = blocks[..., None].astype(np.int64) * parts + np.arange(parts)
    return found.reshape(*blocks.shape[:-1], -1)
