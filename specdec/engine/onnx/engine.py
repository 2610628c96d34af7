"""The ONNX Runtime engine: runs an exported model over packed batches, without torch.

On a GPU, keys and values stay in its memory. Each step copies tokens, positions and masks to it, and copies back the
wanted logits, or for a draft their shortlists.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specdec.engine.attention_size import AttentionSize
from specdec.engine.batch import PackedBatch
from specdec.engine.engine import DraftPass
from specdec.engine.kv.slots import Slots
from specdec.engine.memory import slots_for
from specdec.engine.model_directory import COPY_GRAPH, DESCRIPTION, GRAPH, SHORTLISTS_GRAPH, ModelDirectory
from specdec.engine.model_file import ModelDirectoryError, in_one_line, opened, read_fields, with_class
from specdec.engine.onnx.draft_logits import OnnxDraftLogits
from specdec.engine.onnx.providers import CPU, OnnxDevice, check_started, parse_device, providers
from specdec.engine.onnx_runtime import ort
from specdec.engine.padded.layout import GroupMemory, PaddedBatch, PaddedPacker
from specdec.engine.placement import BYTES
from specdec.engine.processor import cpu_kind, gpu_kind
from specdec.engine.working_memory import ATTENTION_BYTES, attention_bytes, logits_bytes, row_bytes

CPU_DEVICE = OnnxDevice("cpu", 0)


class _Description(NamedTuple):
    """The description of an exported model."""

    pools: list[tuple[int, int, int]]  # of each layer: KV heads, and the widths of keys and values
    window: int | None
    dtype: np.dtype[Any]

    @classmethod
    def of(cls, directory: ModelDirectory) -> _Description:
        """Read the description in a directory; ModelDirectoryError if there is none, or it is damaged."""
        file = directory.path / DESCRIPTION
        description = read_fields(file)
        if description is None:
            raise ModelDirectoryError(
                f"{directory.path}: not an exported model (no {DESCRIPTION}); run `specdec export`"
            )
        try:
            pools = [(int(heads), int(key), int(value)) for heads, key, value in description.content["pools"]]
            window = description.content["window"]
            dtype = np.dtype({"float32": np.float32, "float16": np.float16}[description.content["dtype"]])
            return cls(pools, None if window is None else int(window), dtype)
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise ModelDirectoryError(
                f"{file}: damaged, or from an earlier version; run `specdec export` again ({with_class(error)})"
            ) from error


class OnnxEngine:
    """An exported model and its KV cache, on `device` (cpu, cuda, cuda:1, ...).

    In every run, a pool of keys or values is both an input and an output, bound to the same memory, so that the graph
    updates it in place. The export determines the dtype.
    """

    def __init__(
        self,
        directory: ModelDirectory,
        *,
        capacity: int | None,
        threads: int,
        device: str = "cpu",
    ) -> None:
        shapes, self.window, of_pools = _Description.of(directory)
        self._onnx_device = parse_device(device)
        chosen = providers(self._onnx_device, ort.get_available_providers())
        if self._onnx_device.kind == "cuda":
            with contextlib.redirect_stdout(sys.stderr):  # onnxruntime prints the names of missing libraries
                ort.preload_dlls()
        half = of_pools == np.float16
        self._copies = _session(directory.path / COPY_GRAPH, threads, chosen, half=half)
        check_started(self._onnx_device, self._copies.get_providers())  # with the small graph first
        self._session = _session(directory.path / GRAPH, threads, chosen, half=half)
        check_started(self._onnx_device, self._session.get_providers())
        _check_sizes(directory, self._session, shapes)
        self.exact = False  # all lanes of a batch are padded to one shape
        self.vocabulary = directory.vocabulary
        self.device, self.dtype = device, str(of_pools.name)
        on_cpu = self._onnx_device.kind == "cpu"
        self.threads = (threads,) if on_cpu else ()
        provider = self._session.get_providers()[0]
        processor = cpu_kind() if on_cpu else gpu_kind(self._onnx_device.number)
        self.numerics = f"onnxruntime-{ort.__version__}/{provider}/{processor}/{of_pools.name}/threads-{threads}"
        slot_bytes = of_pools.itemsize * sum(heads * (key + value) for heads, key, value in shapes)
        self._group_memory = GroupMemory(
            most=ATTENTION_BYTES,
            key_bytes=of_pools.itemsize * max(heads * (key + value) for heads, key, value in shapes),
            pair_bytes=BYTES["float32"] * AttentionSize.of(directory).heads,
        )
        self.capacity = capacity = capacity or self._room(slot_bytes, directory)
        self._pools: dict[str, ort.OrtValue] = {}
        for layer, (heads, key_width, value_width) in enumerate(shapes):
            for kind, width in (("key", key_width), ("value", value_width)):
                zeros = np.zeros((capacity, heads, width), of_pools)
                self._pools[f"{kind}_{layer}"] = ort.OrtValue.ortvalue_from_numpy(zeros, *self._onnx_device)
        self._binding = self._session.io_binding()
        taken = {node.name for node in self._session.get_inputs()}
        self._takes_window = "windowed" in taken
        if not on_cpu and (directory.path / SHORTLISTS_GRAPH).is_file():
            finding = _session(directory.path / SHORTLISTS_GRAPH, threads, chosen, half=False)
            self.forward_shortlists: DraftPass = lambda batch: OnnxDraftLogits(self._on_gpu(batch), finding)
        for name, pool in self._pools.items():
            self._binding.bind_ortvalue_input(name, pool)

    def _room(self, slot_bytes: int, directory: ModelDirectory) -> int:
        """Return the number of slots that fit into memory."""
        memory = self._group_memory
        working = attention_bytes(directory.context, memory.key_bytes, memory.pair_bytes)
        if self._onnx_device.kind != "cpu":
            return slots_for(slot_bytes, directory.context, self.device, working=working)
        working, row = working + logits_bytes(self.vocabulary), row_bytes(self.vocabulary)
        return slots_for(slot_bytes, directory.context, self.device, working=working, row_bytes=row)

    def packer(self) -> PaddedPacker:
        return PaddedPacker(window=self.window, group_memory=self._group_memory)

    def forward(self, batch: PackedBatch) -> NDArray[np.float32]:
        assert isinstance(batch, PaddedBatch)  # from our own packer
        if len(batch.groups) == 1:
            return np.asarray(self._run(batch, CPU_DEVICE).numpy())
        logits = np.empty((len(batch.wanted), self.vocabulary), np.float32)
        for wanted, part in batch.parts():
            logits[wanted] = self._run(part, CPU_DEVICE).numpy()
        return logits

    def _on_gpu(self, batch: PackedBatch) -> ort.OrtValue:
        """Run a forward pass; return the logits of the wanted rows on the GPU."""
        assert isinstance(batch, PaddedBatch)  # from our own packer
        if len(batch.groups) == 1:
            return self._run(batch, self._onnx_device)
        return ort.OrtValue.ortvalue_from_numpy(self.forward(batch), *self._onnx_device)

    def _run(self, batch: PaddedBatch, device: OnnxDevice) -> ort.OrtValue:
        """Run a forward pass over a batch of one group; return the logits of the wanted rows on this device."""
        (group,) = batch.groups
        arrays = {
            "tokens": batch.tokens,
            "positions": batch.positions,
            "slots": batch.slots,
            "keys": group.keys,
            "rows": group.rows,
            "visible": group.visible,
            "place": batch.place,
            "wanted": batch.wanted,
        }
        if self._takes_window:
            arrays["windowed"] = group.visible if group.windowed is None else group.windowed
        binding = self._binding
        for name, array in arrays.items():
            binding.bind_cpu_input(name, array)  # copied to the device unless it is the CPU
        binding.clear_binding_outputs()
        binding.bind_output("logits", *device)
        for name, pool in self._pools.items():
            binding.bind_ortvalue_output(f"new_{name}", pool)
        self._session.run_with_iobinding(binding)
        logits: ort.OrtValue = binding.get_outputs()[0]
        return logits

    def copy(self, source: Slots, target: Slots) -> None:
        binding = self._copies.io_binding()
        binding.bind_cpu_input("source", source)
        binding.bind_cpu_input("target", target)
        for pool in self._pools.values():
            binding.bind_ortvalue_input("pool", pool)
            binding.bind_ortvalue_output("new_pool", pool)
            self._copies.run_with_iobinding(binding)


def _session(
    graph: Path, threads: int, chosen: list[tuple[str, dict[str, Any]]], *, half: bool
) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # Spinning threads would starve the other services of a shared machine.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    options.log_severity_level = 3
    if half and chosen[0][0] == CPU:
        # The next level, for convolutions, crashes onnxruntime 1.31's CPU provider on a float16 graph.
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    with opened(graph):  # refuses a named pipe, where onnxruntime would block
        pass
    try:
        return ort.InferenceSession(str(graph), options, providers=chosen)
    except Exception as error:  # onnxruntime's errors have no common base
        raise ModelDirectoryError(f"{graph}: cannot be loaded: {in_one_line(error)}") from error


def _check_sizes(directory: ModelDirectory, graph: ort.InferenceSession, pools: list[tuple[int, int, int]]) -> None:
    """Raise ModelDirectoryError unless the graph's inputs and outputs have the sizes given in its directory's other
    files. Otherwise the first step would fail."""
    described = {f"key_{layer}": (DESCRIPTION, [heads, key]) for layer, (heads, key, _) in enumerate(pools)}
    described |= {f"value_{layer}": (DESCRIPTION, [heads, value]) for layer, (heads, _, value) in enumerate(pools)}
    described["logits"] = ("config.json", [directory.vocabulary])
    sizes = {node.name: node.shape[1:] for node in (*graph.get_inputs(), *graph.get_outputs())}
    for name, (file, expected) in described.items():
        if sizes.get(name) != expected:
            raise ModelDirectoryError(
                f"{directory.path / GRAPH}: {name} has the shape {sizes.get(name)}, must have {expected} as in {file}"
            )
