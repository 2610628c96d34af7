"""Export of a Hugging Face causal language model as one ONNX graph over packed batches.

The graph is a trace of the torch engine's forward pass over a padded batch. The pools of keys and values are inputs
returned as outputs, bound to the same memory by the ONNX engine. Running the exported folder needs no torch.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import onnx
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.decoding.draft_logits import MAX_DRAFT_LOGITS
from specdec.engine.engine import UnsupportedModelError
from specdec.engine.hf.linear import Float32Head
from specdec.engine.hf.pretrained import DTYPES, LayerAttention, attention_of, load, window_of
from specdec.engine.hf.reference_check import ReferenceCheck
from specdec.engine.model_directory import COPY_GRAPH, DESCRIPTION, GRAPH, SHORTLISTS_GRAPH, ModelDirectory
from specdec.engine.onnx.replaceable import check_replaceable
from specdec.engine.padded.attention import AttentionGroup, PaddedAttention

COPIED = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)
"""Files copied from the original model to the export."""

Dtype = Literal["float32", "float16"]
"""Possible dtypes of a graph: NumPy, used to make the pools, has no bfloat16."""

OPSET = 23
IR_VERSION = 10
"""The IR version of hand-written graphs, readable by the oldest supported onnxruntime."""

INPUTS = ("tokens", "positions", "slots", "keys", "rows", "visible", "windowed", "place", "wanted")
"""Names of the graph's inputs, in order: the arrays of a padded batch with one group. The pools follow."""


@dataclass
class TracedPools:
    """Keys and values of all layers, updated by making new tensors, as tracing requires."""

    keys: list[Tensor]
    values: list[Tensor]
    written: list[int] = field(default_factory=list)

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self.keys[layer] = self.keys[layer].index_put((slots,), keys)
        self.values[layer] = self.values[layer].index_put((slots,), values)
        return self.keys[layer], self.values[layer]


class _Graph(torch.nn.Module):
    """The forward pass as a function of tensors alone."""

    def __init__(self, model: torch.nn.Module, layers: int) -> None:
        super().__init__()
        self.model = model
        self.layers = layers

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        keys: Tensor,
        rows: Tensor,
        visible: Tensor,
        windowed: Tensor,
        place: Tensor,
        wanted: Tensor,
        pools: list[Tensor],
    ) -> tuple[Tensor, list[Tensor]]:
        memory = TracedPools(pools[: self.layers], pools[self.layers :])
        group = AttentionGroup(keys, rows, visible, windowed)
        packed = PaddedAttention(memory, slots, [group], place, fused=False)
        logits = self.model(
            input_ids=tokens[None],
            position_ids=positions[None],
            logits_to_keep=wanted,
            use_cache=False,
            packed=packed,
        ).logits
        return logits[0], [*memory.keys, *memory.values]


def export(directory: ModelDirectory, target: Path, dtype: Dtype = "float32") -> None:
    """Write graphs, configuration and tokenizer into `target`, completely or not at all.

    Weights, keys and values are in `dtype`; the graph's logits are always float32. An earlier export in `target` is
    replaced; anything else there is left alone, with a ModelDirectoryError.
    """
    check_replaceable(target)
    model = load(directory, DTYPES[dtype], "cpu")
    ReferenceCheck.of(model, directory.vocabulary)  # raises an error if the model does not run in this dtype
    model.set_output_embeddings(Float32Head(model.get_output_embeddings()))
    attends = attention_of(model)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{target.name}.partial-", dir=target.parent))
    try:
        with _quiet(directory.name):
            _write_graph(model, attends, partial / GRAPH)
        onnx.save(copy_graph(dtype), partial / COPY_GRAPH)
        onnx.save(shortlists_graph(), partial / SHORTLISTS_GRAPH)
        description = {
            "dtype": dtype,
            "pools": [[attention.kv_heads, attention.width, attention.value_width] for attention in attends],
            "window": window_of(model),
            "model": directory.name,
            "model_fingerprint": directory.model_fingerprint,
        }
        (partial / DESCRIPTION).write_text(json.dumps(description, indent=2) + "\n")
        for name in COPIED:
            if (directory.path / name).is_file():
                shutil.copy(directory.path / name, partial / name)
        _replace(target, partial)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _replace(target: Path, new: Path) -> None:
    """Replace a directory possibly in use by drafts: it is missing only for a moment."""
    before = new.with_name(f"{new.name}-before")
    if target.exists():
        target.rename(before)
    try:
        new.rename(target)
    except OSError:
        if before.exists():
            before.rename(target)
        raise
    shutil.rmtree(before, ignore_errors=True)


def _write_graph(model: PreTrainedModel, attends: list[LayerAttention], path: Path) -> None:
    """Write the graph of a forward pass over a padded batch with dynamic sizes."""
    layers = len(attends)
    dim = torch.export.Dim
    t, n, g, r, k, s = dim("t"), dim("n"), dim("g"), dim("r"), dim("k"), dim("s")
    # Sizes of at least 2, different for different dimensions: a 1 or equal sizes would be taken for constants.
    example = (
        torch.zeros(6, dtype=torch.int64),
        torch.arange(6),
        torch.arange(1, 7),
        torch.ones(3, 64, dtype=torch.int64),
        torch.zeros(3, 4, dtype=torch.int64),
        torch.ones(3, 4, 64, dtype=torch.bool),
        torch.ones(3, 4, 64, dtype=torch.bool),
        torch.zeros(6, dtype=torch.int64),
        torch.arange(2),
        [torch.zeros(128, attention.kv_heads, attention.width, dtype=model.dtype) for attention in attends]
        + [torch.zeros(128, attention.kv_heads, attention.value_width, dtype=model.dtype) for attention in attends],
    )
    shapes_of_inputs = (
        {0: t},
        {0: t},
        {0: t},
        {0: g, 1: k},
        {0: g, 1: r},
        {0: g, 1: r, 2: k},
        {0: g, 1: r, 2: k},
        {0: t},
        {0: n},
        [{0: s}] * (2 * layers),
    )
    pool_names = [f"{kind}_{layer}" for kind in ("key", "value") for layer in range(layers)]
    torch.onnx.export(
        _Graph(model, layers).eval(),
        example,
        path,
        dynamo=True,
        opset_version=OPSET,
        input_names=[*INPUTS, *pool_names],
        output_names=["logits", *(f"new_{name}" for name in pool_names)],
        dynamic_shapes=shapes_of_inputs,
        external_data=True,
    )


def copy_graph(dtype: Dtype) -> onnx.ModelProto:
    """Return the graph that copies rows within a pool; it reads all of them before it writes any."""
    kind = {"float32": onnx.TensorProto.FLOAT, "float16": onnx.TensorProto.FLOAT16}[dtype]
    pool = ["slots", "heads", "width"]
    slots = onnx.TensorProto.INT64
    return onnx.helper.make_model(
        onnx.helper.make_graph(
            [
                onnx.helper.make_node("Gather", ["pool", "source"], ["rows"], axis=0),
                onnx.helper.make_node("Unsqueeze", ["target", "last"], ["places"]),
                onnx.helper.make_node("ScatterND", ["pool", "places", "rows"], ["new_pool"]),
            ],
            "copy",
            [
                onnx.helper.make_tensor_value_info("pool", kind, pool),
                onnx.helper.make_tensor_value_info("source", slots, ["n"]),
                onnx.helper.make_tensor_value_info("target", slots, ["n"]),
            ],
            [onnx.helper.make_tensor_value_info("new_pool", kind, pool)],
            [onnx.helper.make_tensor("last", slots, [1], [1])],
        ),
        opset_imports=[onnx.helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
    )


def shortlists_graph() -> onnx.ModelProto:
    """Return the graph that computes the shortlists of logits, and the rows with NaN. Among equal logits TopK lists
    lower ids first."""
    node, tensor, kinds = onnx.helper.make_node, onnx.helper.make_tensor_value_info, onnx.TensorProto
    return onnx.helper.make_model(
        onnx.helper.make_graph(
            [
                node("Shape", ["logits"], ["vocabulary"], start=1, end=2),
                node("Min", ["vocabulary", "most"], ["count"]),
                node("TopK", ["logits", "count"], ["values", "ids"], axis=1),
                node("IsNaN", ["logits"], ["nan"]),
                node("Cast", ["nan"], ["numbers"], to=kinds.FLOAT),
                node("ReduceMax", ["numbers", "axes"], ["broken"], keepdims=0),
            ],
            "shortlists",
            [tensor("logits", kinds.FLOAT, ["n", "v"])],
            [
                tensor("values", kinds.FLOAT, ["n", "k"]),
                tensor("ids", kinds.INT64, ["n", "k"]),
                tensor("broken", kinds.FLOAT, ["n"]),
            ],
            [
                onnx.helper.make_tensor("most", kinds.INT64, [1], [MAX_DRAFT_LOGITS]),
                onnx.helper.make_tensor("axes", kinds.INT64, [1], [1]),
            ],
        ),
        opset_imports=[onnx.helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
    )


def exported(directory: ModelDirectory, dtype: Dtype = "float32") -> Path:
    """Return the path of a model's export: the directory itself, or one in the user's cache, made now if it is
    missing."""
    if (directory.path / GRAPH).is_file():
        return directory.path
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    # The graph's version is part of the path, so that a newer exporter does not find an older one's files.
    target = cache / "specdec" / "onnx-2" / dtype / directory.model_fingerprint[:24] / directory.name
    if not (target / DESCRIPTION).is_file():
        (cache / "specdec").mkdir(mode=0o700, parents=True, exist_ok=True)  # as required by `cache_folder.py`
        export(directory, target, dtype)
    return target


@contextlib.contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Silence the exporter, which reports on stdout and in warnings, and raise its errors as one line."""
    level = logging.getLogger("torch.onnx").level
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except Exception as error:  # the exporter's errors have no common base
        first_line = str(error).strip().partition("\n")[0]
        raise UnsupportedModelError(f"{name} cannot be exported: {type(error).__name__}: {first_line}") from error
    finally:
        logging.getLogger("torch.onnx").setLevel(level)
