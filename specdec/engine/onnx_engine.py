"""The ONNX Runtime engine: an exported model over packed batches, without torch."""

from __future__ import annotations

import json
import platform

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from specdec.engine.batch import PackedBatch
from specdec.engine.kv import Slots
from specdec.engine.lanes import LaneBatch, LanePacker
from specdec.engine.memory import slots_for
from specdec.engine.model_directory import DESCRIPTION, GRAPH, ModelDirectory, ModelDirectoryError


class OnnxEngine:
    """An exported model and its key/value memory.

    The pools are bound as inputs and as outputs of every run, to the same memory: the graph updates
    them in place.
    """

    def __init__(self, directory: ModelDirectory, *, capacity: int | None, threads: int) -> None:
        file = directory.path / DESCRIPTION
        try:
            description = json.loads(file.read_text(encoding="utf-8"))
            shapes = [(int(heads), int(key), int(value)) for heads, key, value in description["pools"]]
            self.window: int | None = description["window"]
        except FileNotFoundError as error:
            raise ModelDirectoryError(
                f"{directory.path}: not an exported model (no {DESCRIPTION}); `specdec export` makes one"
            ) from error
        except (ValueError, KeyError, TypeError) as error:
            raise ModelDirectoryError(f"{file}: damaged; `specdec export` makes a new one ({error!r})") from error
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        # Spinning threads would starve the other services of a shared machine.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.add_session_config_entry("session.inter_op.allow_spinning", "0")
        options.log_severity_level = 3
        providers = [p for p in ("CUDAExecutionProvider", "CPUExecutionProvider") if p in ort.get_available_providers()]
        try:
            self._session = ort.InferenceSession(str(directory.path / GRAPH), options, providers=providers)
        except Exception as error:  # onnxruntime's errors have no common base
            raise ModelDirectoryError(f"{directory.path / GRAPH}: cannot be loaded: {error}") from error
        self.threads: tuple[int, ...] = (threads,)
        self.exact = False  # all lanes of a batch are padded to one shape
        self.vocabulary = directory.vocabulary
        provider = self._session.get_providers()[0]
        self.numerics = f"onnxruntime-{ort.__version__}/{provider}/{platform.machine()}/float32/threads-{threads}"
        self._device = "cuda" if provider == "CUDAExecutionProvider" else "cpu"
        slot_bytes = 4 * sum(heads * (key + value) for heads, key, value in shapes)
        self.capacity = capacity = capacity or slots_for(slot_bytes, directory.context, self._device)
        self._pools: dict[str, ort.OrtValue] = {}
        for layer, (heads, key_width, value_width) in enumerate(shapes):
            for kind, width in (("key", key_width), ("value", value_width)):
                zeros = np.zeros((capacity, heads, width), dtype=np.float32)
                self._pools[f"{kind}_{layer}"] = ort.OrtValue.ortvalue_from_numpy(zeros, self._device, 0)
        self._binding = self._session.io_binding()
        taken = {node.name for node in self._session.get_inputs()}
        self._takes_window = "windowed" in taken
        for name, pool in self._pools.items():
            self._binding.bind_ortvalue_input(name, pool)

    def packer(self) -> LanePacker:
        return LanePacker(window=self.window, one_group=True)

    def forward(self, batch: PackedBatch) -> NDArray[np.float32]:
        assert isinstance(batch, LaneBatch)  # from our own packer
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
            binding.bind_cpu_input(name, array)
        binding.clear_binding_outputs()
        binding.bind_output("logits", "cpu")
        for name, pool in self._pools.items():
            binding.bind_ortvalue_output(f"new_{name}", pool)
        self._session.run_with_iobinding(binding)
        return np.asarray(binding.get_outputs()[0].numpy())

    def copy(self, source: Slots, target: Slots) -> None:
        for pool in self._pools.values():
            if self._device == "cpu":
                view = pool.numpy()  # shares the memory
                view[target] = view[source]
            else:
                rows = pool.numpy()
                rows[target] = rows[source]
                pool.update_inplace(rows)

    def use_threads(self, count: int) -> None:
        """A session of onnxruntime has the threads that it was made with."""
