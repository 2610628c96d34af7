"""The torch engine: any causal language model of transformers over packed batches."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as transformers_logging

from specdec.engine import attention
from specdec.engine.attention import PackedAttention
from specdec.engine.batch import PackedBatch, Packer
from specdec.engine.compiled import LEAST_ROWS as LEAST_COMPILED_ROWS
from specdec.engine.compiled import CompiledModel, frozen
from specdec.engine.engine import UnsupportedModelError
from specdec.engine.invariance import CANDIDATES, Linear, find, rows_are_independent, tile, untile
from specdec.engine.kv import Slots
from specdec.engine.lane_attention import Group, LaneAttention
from specdec.engine.lanes import LEAST_ROWS, LaneBatch, LaneGroup, LanePacker
from specdec.engine.linear import Float32Head, can_pack, lay_out
from specdec.engine.memory import keep_freed_memory, slots_for
from specdec.engine.model_directory import ModelDirectory, ModelDirectoryError
from specdec.engine.path_attention import NUMBA, PathAttention, PathMemory
from specdec.engine.paths import PathBatch, PathPacker
from specdec.engine.row_class import RowClass

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PROBE = "specdec-probe"
DISAGREEMENT = {torch.float32: 1e-3, torch.bfloat16: 0.25}
"""Largest relative difference from the model's own forward that the check at start lets pass."""


@dataclass
class EagerPools:
    """Memory that is written in place."""

    keys: list[Tensor]
    values: list[Tensor]

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self.keys[layer].index_copy_(0, slots, keys)
        self.values[layer].index_copy_(0, slots, values)
        return self.keys[layer], self.values[layer]


class TorchEngine:
    """A model and its key/value memory on one device.

    `capacity` is in slots; None takes what memory there is room for. `exact` asks for rows that do not depend on
    their batch; the attribute says whether the check at start found it to be so. On a CPU attention goes by paths,
    elsewhere by lanes. `compiled` has torch fuse the layers (`compiled.py`).
    """

    def __init__(
        self,
        directory: ModelDirectory,
        *,
        capacity: int | None,
        dtype: str = "float32",
        device: str = "cpu",
        exact: bool = True,
        threads: int | None = None,
        compiled: bool = False,
    ) -> None:
        threads = threads or torch.get_num_threads()
        torch.set_num_threads(threads)
        self.model = load(directory, DTYPES[dtype], device)
        self.model.set_output_embeddings(Float32Head(self.model.get_output_embeddings()))
        packed = device == "cpu" and can_pack(DTYPES[dtype]) and not compiled
        lay_out(self.model, packed=packed)
        self.vocabulary = directory.vocabulary
        self.window = window_of(self.model)
        self._by_path = device == "cpu"
        self._device = torch.device(device)
        shapes = cache_shapes(self.model)
        slot_bytes = DTYPES[dtype].itemsize * sum(heads * (key + value) for heads, key, value in shapes)
        self.capacity = capacity = capacity or slots_for(slot_bytes, device)
        place: dict[str, Any] = {"dtype": DTYPES[dtype], "device": device}
        keys = [torch.zeros(capacity, heads, width, **place) for heads, width, _ in shapes]
        values = [torch.zeros(capacity, heads, width, **place) for heads, _, width in shapes]
        keep_freed_memory()  # from here on: the pools themselves are fetched faster in huge pages, from the system
        self._pools = EagerPools(keys, values)
        self._memory = PathMemory(keys, values) if self._by_path else None
        self._rows: RowClass | None = None
        self._run: Callable[..., Any] = self.model
        self._compiled = False
        check_against_own_forward(self)
        if compiled:
            self._compile()
        self.exact = False
        if exact:
            self._make_exact()
        self.numerics = "/".join(
            (
                f"torch-{torch.__version__}",
                f"transformers-{transformers.__version__}",
                _device_kind(device),
                dtype,
                f"threads-{threads}",
                "compiled" if compiled else "packed" if packed else "plain",
                f"paths-numba-{NUMBA}" if self._by_path else "lanes",
                f"exact-{self._rows}" if self.exact else "fast",
            )
        )

    def packer(self) -> Packer:
        if self._by_path:
            return PathPacker(rows=self._rows)
        return LanePacker(rows=self._rows, window=self.window, least_rows=LEAST_ROWS if self._rows else 1)

    def forward(self, batch: PackedBatch) -> NDArray[np.float32]:
        # In inference mode torch's compiler would not freeze the weights, and be slower than no compiler.
        with torch.no_grad() if self._compiled else torch.inference_mode():
            logits: Tensor = self._run(
                input_ids=self._tensor(batch.tokens)[None],
                position_ids=self._tensor(batch.positions)[None],
                logits_to_keep=self._tensor(batch.wanted),
                use_cache=False,
                packed=self._attention(batch),
            ).logits
            return np.asarray(logits[0].cpu().numpy())

    @torch.inference_mode()
    def copy(self, source: Slots, target: Slots) -> None:
        source_rows, target_rows = self._tensor(source), self._tensor(target)
        for pool in (*self._pools.keys, *self._pools.values):
            pool.index_copy_(0, target_rows, pool.index_select(0, source_rows))

    def _compile(self) -> None:
        self._rows = RowClass(tuple(count for count in CANDIDATES if count >= LEAST_COMPILED_ROWS))
        self._run, self._compiled = CompiledModel(self.model), True
        packer = self.packer()
        rows = packer.add_rows([0, 0, 0], 0, [1, 2, 3])
        packer.add_path(np.arange(1, 4), rows)
        packer.want(rows[-1])
        try:
            with frozen():
                self.forward(packer.pack())
        except Exception as error:  # the compiler's errors have no common base
            reason = str(error).strip().partition("\n")[0]
            name = type(self.model).__name__
            raise UnsupportedModelError(f"{name} cannot be compiled: {type(error).__name__}: {reason}") from error

    def _make_exact(self) -> None:
        """Run at the members of a row class only, if then rows do not depend on their batch indeed."""
        if self._compiled:  # the compiler owns the layers: all its numbers of rows, or none
            self.exact = rows_are_independent(self)
            return
        linears = [module for module in self.model.modules() if isinstance(module, Linear)]
        self._rows = find(linears, str(self._device))
        tile(self.model, self._rows)
        self.exact = rows_are_independent(self)
        if not self.exact:
            self._rows = None
            untile(self.model)

    def _attention(self, batch: PackedBatch) -> PackedAttention:
        if isinstance(batch, PathBatch):
            assert self._memory is not None
            return PathAttention(self._memory, batch)
        assert isinstance(batch, LaneBatch)  # from our own packer
        in_order = bool((batch.place == np.arange(len(batch.place))).all())
        groups = [self._group(group) for group in batch.groups]
        once = in_order and sum(group.rows.numel() for group in groups) == len(batch.tokens)
        place = None if once else self._tensor(batch.place)
        return LaneAttention(self._pools, self._tensor(batch.slots), groups, place, fused=True)

    def _group(self, group: LaneGroup) -> Group:
        first, length = int(group.keys[0, 0]), group.keys.shape[1]
        keys: Tensor | slice
        if group.contiguous and first + length <= self.capacity:
            keys = slice(first, first + length)
        else:
            keys = self._tensor(group.keys)
        return Group(
            keys,
            self._tensor(group.rows),
            self._tensor(group.visible),
            None if group.windowed is None else self._tensor(group.windowed),
        )

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self._device.type == "cpu" else tensor.to(self._device, non_blocking=True)


def _device_kind(device: str) -> str:
    """What computes, as far as it decides bits."""
    if torch.device(device).type == "cuda":
        return f"cuda-{torch.version.cuda}-{torch.cuda.get_device_name(device).replace(' ', '-')}"
    return f"{device}-{platform.machine()}-{torch.backends.cpu.get_cpu_capability()}"


def load(directory: ModelDirectory, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """The model with our attention, or an error that says why not."""
    _check_configuration(directory)
    transformers_logging.disable_progress_bar()
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            directory.path,
            dtype=dtype,
            attn_implementation=attention.NAME,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:  # transformers raises whatever it meets
        raise ModelDirectoryError(f"{directory.path}: cannot be loaded: {error}") from error
    if report["missing_keys"]:  # transformers would go on with random numbers
        missing = sorted(report["missing_keys"])
        raise ModelDirectoryError(f"{directory.path}: {len(missing)} tensors are missing, {missing[0]} for one")
    return model.to(device).eval()


def _check_configuration(directory: ModelDirectory) -> None:
    """Refuse by name what the weights need not be loaded for."""
    for rope_type in _rope_types(directory.config):
        if rope_type in ("dynamic", "longrope"):
            raise UnsupportedModelError(
                f"{directory.name}: {rope_type} rotary embeddings depend on the longest text in a batch, "
                "so that a session's tokens would depend on its neighbours"
            )
    if directory.config.get("attention_chunk_size"):
        raise UnsupportedModelError(f"{directory.name}: chunked attention is not supported")
    try:
        config = AutoConfig.from_pretrained(directory.path, local_files_only=True, trust_remote_code=False)
        kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    except Exception as error:  # transformers raises whatever it meets
        raise ModelDirectoryError(f"{directory.path}: cannot be loaded: {error}") from error
    if kind is None:
        raise UnsupportedModelError(f"{directory.name}: {type(config).__name__} belongs to no causal language model")
    if not getattr(kind, "_supports_attention_backend", False):
        raise UnsupportedModelError(
            f"{directory.name}: {kind.__name__} does not take its attention from transformers' attention "
            "interface, so that it cannot run in a packed batch"
        )


def _rope_types(config: dict[str, Any]) -> list[str]:
    """Of all layers; newer configurations nest the parameters by kind of layer."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return [str(p.get("rope_type", p.get("type", "default"))) for p in nested or [parameters]]


def window_of(model: PreTrainedModel) -> int | None:
    """The sliding window in tokens, if any layer has one."""
    config = model.config.get_text_config()
    if getattr(config, "use_sliding_window", True) is False:
        return None
    window = getattr(config, "sliding_window", None)
    return int(window) if window else None


def cache_shapes(model: PreTrainedModel) -> list[tuple[int, int, int]]:
    """(heads, key width, value width) of every layer's cache.

    Found by running one token with an attention that only looks: it also sees what a layer asks of its
    attention, and refuses what the packed one would leave out.
    """
    config = model.config.get_text_config()
    name = type(model).__name__
    found: dict[int, tuple[int, int, int]] = {}
    windows: set[int] = set()

    def look(
        module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **asked: Any
    ) -> tuple[Tensor, None]:
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        found[layer] = (key.shape[1], key.shape[3], value.shape[3])
        if asked.get("sliding_window"):
            windows.add(layer)
        terms = [term for term, value in asked.items() if isinstance(value, Tensor) and term != "position_ids"]
        if terms:
            raise UnsupportedModelError(f"{name}: its attention has a term the packed one does not know, {terms[0]}")
        return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None

    AttentionInterface.register(PROBE, look)
    AttentionMaskInterface.register(PROBE, attention.no_mask)
    zero = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    try:
        model.set_attn_implementation(PROBE)
        with torch.inference_mode():
            model(input_ids=zero, position_ids=zero, use_cache=False)
    except UnsupportedModelError:
        raise
    except Exception as error:  # whatever a foreign architecture does with a packed batch
        raise UnsupportedModelError(f"{name} cannot run in a packed batch: {type(error).__name__}: {error}") from error
    finally:
        model.set_attn_implementation(attention.NAME)
    layers = config.num_hidden_layers
    if sorted(found) != list(range(layers)):
        raise UnsupportedModelError(
            f"{name}: {layers} layers, but attention ran in {len(found)} of them; "
            "models with state-space or other layers that keep a state of their own are not supported"
        )
    kinds = (
        getattr(config, "layer_types", None) or ["sliding_attention" if window_of(model) else "full_attention"] * layers
    )
    for layer, kind in enumerate(kinds):
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedModelError(f"{name}: layer {layer} is of kind {kind}, which is not supported")
        if kind == "sliding_attention" and window_of(model) and layer not in windows:
            raise UnsupportedModelError(f"{name}: layer {layer} has a sliding window, but does not tell its attention")
    return [found[layer] for layer in range(layers)]


@torch.inference_mode()
def check_against_own_forward(engine: TorchEngine) -> None:
    """Compare a packed prompt with a branch in it against the model's own forward; refuse a difference.

    This is what finds an architecture whose attention has terms that the packed one does not know.
    """
    model = engine.model
    config = model.config.get_text_config()
    length = min(24, int(getattr(config, "max_position_embeddings", 24)))
    generator = np.random.default_rng(0)
    text = generator.integers(1, engine.vocabulary, length).tolist()
    branch = [(text[-2] + 1) % engine.vocabulary, (text[-1] + 2) % engine.vocabulary]
    slots = np.arange(1, length + 3)
    packer = engine.packer()
    rows = packer.add_rows(text, 0, slots[:length])
    packer.add_path(slots[:length], list(rows))
    side = packer.add_rows(branch, length - 2, slots[length:])
    packer.add_path(np.concatenate([slots[: length - 2], slots[length:]]), list(side))
    packer.want(rows[-1])
    packer.want(side[-1])
    got = torch.from_numpy(engine.forward(packer.pack()))

    texts = torch.tensor([text, text[:-2] + branch], device=model.device)
    try:
        model.set_attn_implementation("eager")
        want = model(input_ids=texts, use_cache=False).logits[:, -1].float().cpu()
    finally:
        model.set_attn_implementation(attention.NAME)
    scale = float(want.abs().max())
    difference = float((got - want).abs().max()) / scale
    if not difference <= DISAGREEMENT[model.dtype]:
        raise UnsupportedModelError(
            f"{type(model).__name__}: packed logits differ from the model's own by {difference:.2g} of their scale; "
            "its attention does something the packed one does not know"
        )
