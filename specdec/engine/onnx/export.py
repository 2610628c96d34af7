"""Exports a Hugging Face causal language model as one ONNX graph over packed batches.

The graph is a trace of the torch engine's forward pass over a padded batch. The pools of keys and values are inputs,
and are returned as outputs; the ONNX engine binds both to the same memory. Running the exported folder needs no torch.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import logging
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import structlog
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from specdec.decoding.draft_logits import MAX_DRAFT_LOGITS
from specdec.engine.hf.linear import Float32Head
from specdec.engine.hf.pretrained import DTYPES, LayerAttention, attention_of, load, shared_window
from specdec.engine.hf.reference_check import ReferenceCheck
from specdec.engine.learned_from import LEARNED_FROM
from specdec.engine.memory import drop_file_pages, give_freed_memory_back
from specdec.engine.model_directory import COPY_GRAPH, DESCRIPTION, GRAPH, SHORTLISTS_GRAPH, ModelDirectory
from specdec.engine.model_folder import check_replaceable, replaced
from specdec.engine.onnx.agreement import Agreement, agreement, logits_of_model, sample_tokens
from specdec.engine.onnx.weights import Bits, lay_out, size_of
from specdec.engine.padded.attention import AttentionGroup, PaddedAttention
from specdec.engine.placement import GraphDtype
from specdec.engine.preflight.device import installed
from specdec.engine.preflight.memory_needed import MIN_QUANTISED_BYTES
from specdec.engine.start_phases import Progress
from specdec.engine.unsupported import UnsupportedModelError

log = structlog.get_logger()

GRAPH_DATA = f"{GRAPH}.data"
"""File of the graph's weights."""

COPIED = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    LEARNED_FROM,
)
"""Files copied from the original model to the export."""

MIN_OVERLAP = 0.9
"""Minimum overlap (`Agreement`) with the unquantised model for weights to be quantised by default."""

OPSET = 23
IR_VERSION = 10
"""The IR version of hand-written graphs, readable by the oldest supported onnxruntime."""

INPUTS = ("tokens", "positions", "slots", "keys", "rows", "visible", "windowed", "place", "wanted")
"""Names of the graph's inputs, in order: the arrays of a padded batch with one group. The pools follow."""


@dataclass
class TracedPools:
    """Keys and values of all layers. They are updated by making new tensors, as tracing requires."""

    keys: list[Tensor]
    values: list[Tensor]

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


def export(
    directory: ModelDirectory,
    target: Path,
    dtype: GraphDtype = "float32",
    bits: Bits | None = None,
    progress: Progress = lambda what, done, total: None,
) -> Agreement | None:
    """Write graphs, configuration and tokenizer into `target`, completely or not at all.

    Keys and values have `dtype`, and so have weights unless quantised to 4 or 8 `bits`; the graph's logits are always
    float32. If `bits` is None, weights get the fewest bits that give an overlap of MIN_OVERLAP or more on a sample
    text; models smaller than MIN_QUANTISED_BYTES, and models in float16, are then not quantised. Returns the agreement
    of a quantised export with the model; None if the export is not quantised, or in float16. An earlier export in
    `target` is replaced. Any other content stays, and so does the model itself: ModelDirectoryError is raised.
    """
    check_replaceable(target, DESCRIPTION, directory.path)
    model = load(directory, DTYPES[dtype], "cpu")
    ReferenceCheck.of(model, directory)  # raises an error if the model does not run in this dtype
    drop_file_pages(".safetensors")
    weights = sum(parameter.nbytes for parameter in model.parameters())
    candidates = [bits] if bits is not None else _candidates(dtype, weights)
    tokens = sample_tokens(directory) if dtype == "float32" and candidates != [32] else []
    expected = logits_of_model(model, tokens) if tokens else None
    model.set_output_embeddings(Float32Head(model.get_output_embeddings()))
    attends = attention_of(model)
    window = shared_window(attends)
    with _quiet(directory.name):
        program = _trace(model, attends)
    traced = program.model
    with replaced(target, DESCRIPTION, directory.path) as folder:
        for name in COPIED:
            if (directory.path / name).is_file():
                shutil.copy(directory.path / name, folder / name)
        onnx.save(copy_graph(dtype), folder / COPY_GRAPH)
        onnx.save(shortlists_graph(), folder / SHORTLISTS_GRAPH)
        for chosen in candidates:
            program.model = traced.clone()
            lay_out(program.model, chosen, directory.vocabulary, partial(progress, "quantising"))
            with _quiet(directory.name):
                program.optimize()
            _save(program.model, folder / GRAPH, partial(progress, "writing"))
            description: dict[str, Any] = {
                "dtype": dtype,
                "bits": chosen,
                "pools": [[attention.kv_heads, attention.width, attention.value_width] for attention in attends],
                "window": window,
                "model": directory.name,
                "model_fingerprint": directory.model_fingerprint,
                "bytes": {file.name: file.stat().st_size for file in folder.iterdir() if file.name != DESCRIPTION},
            }
            (folder / DESCRIPTION).write_text(json.dumps(description, indent=2) + "\n")  # read by the engine
            if expected is None or chosen == 32:
                return None
            program.model = traced
            _free()  # frees the quantised weights, already written
            found = _agreement(folder, tokens, expected)
            _free()  # frees the engine
            if bits is not None or found.overlap >= MIN_OVERLAP:
                description["agreement"] = {name: round(value, 4) for name, value in found._asdict().items()}
                (folder / DESCRIPTION).write_text(json.dumps(description, indent=2) + "\n")
                return found
    raise AssertionError("the last candidate is not quantised")


def _candidates(dtype: GraphDtype, weights: int) -> list[Bits]:
    """Return the bits to try by default for `weights` bytes, in order; the last entry needs no check."""
    if dtype != "float32" or weights < MIN_QUANTISED_BYTES:
        return [32]
    if not installed("onnxruntime"):
        log.warning("not_quantised", why="onnxruntime is not installed", cost="a draft needs several times the memory")
        return [32]
    return [4, 8, 32]


def _free() -> None:
    """Return the memory of unused graphs and engines to the system, after collecting their reference cycles."""
    gc.collect()
    give_freed_memory_back()


def _agreement(folder: Path, tokens: list[int], expected: NDArray[np.float32]) -> Agreement:
    from specdec.engine.onnx.engine import OnnxEngine  # imports onnxruntime, needed only here

    engine = OnnxEngine(ModelDirectory(folder), capacity=len(tokens) + 1, threads=torch.get_num_threads())
    return agreement(engine, tokens, expected)


def _trace(model: PreTrainedModel, attends: list[LayerAttention]) -> torch.onnx.ONNXProgram:
    """Return the graph of a forward pass over a padded batch with dynamic sizes. It is not optimised yet, since that
    would transpose all weights in memory."""
    layers = len(attends)
    dim = torch.export.Dim
    t, n, g, r, k, s = dim("t"), dim("n"), dim("g"), dim("r"), dim("k"), dim("s")
    # Sizes are at least 2 and differ between dimensions: a 1, or equal sizes, would be treated as constants.
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
    program = torch.onnx.export(
        _Graph(model, layers).eval(),
        example,
        dynamo=True,
        optimize=False,
        opset_version=OPSET,
        input_names=[*INPUTS, *pool_names],
        output_names=["logits", *(f"new_{name}" for name in pool_names)],
        dynamic_shapes=shapes_of_inputs,
    )
    assert program is not None  # as always with dynamo
    return program


def _save(graph: ir.Model, file: Path, progress: Callable[[int, int], None]) -> None:
    """Write a graph, and its weights next to it, one at a time."""
    total = size_of(graph)

    def wrote(tensor: ir.TensorProtocol, place: ir.external_data.CallbackInfo) -> None:
        progress(place.offset + tensor.nbytes, total)

    ir.save(graph, file, external_data=GRAPH_DATA, callback=wrote)


def copy_graph(dtype: GraphDtype) -> onnx.ModelProto:
    """Return the graph that copies slots within a pool; it reads all of them before it writes any."""
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
    """Return the graph that computes the shortlists of logits, and the rows with NaN. Among equal logits, TopK lists
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


@contextlib.contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Silence the exporter, which reports on stdout and in warnings, and raise its errors as one line."""
    loggers = [logging.getLogger(library) for library in ("torch.onnx", "onnx_ir", "onnxscript")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except OSError:  # about the folder, not the model
        raise
    except Exception as error:  # the exporter's errors have no common base
        first_line = str(error).strip().partition("\n")[0]
        raise UnsupportedModelError(f"{name} cannot be exported: {type(error).__name__}: {first_line}") from error
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
