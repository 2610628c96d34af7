"""Memory requirements of a model: its weights (by their files' headers), its keys and values, the working memory of its
checks and steps (on a GPU, attention's partials), and on a CPU the process around them.

Only the process's own memory counts. Weight files are mapped: their pages belong to the system's page cache, and can be
reclaimed. Anything that headers and configuration do not show is left out, so that no start is refused that would
succeed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from specdec.decoding.block_hashes import HASHED_TOKENS
from specdec.engine.attention_size import AttentionSize
from specdec.engine.derived_models import place_of_export, what_is_broken
from specdec.engine.memory import MIN_SLOTS, slots_wanted, slots_within
from specdec.engine.model_directory import DESCRIPTION, ModelDirectory
from specdec.engine.model_file import Fields, read_fields
from specdec.engine.partials import numbers_of_a_partial, partials_for
from specdec.engine.placement import BITS, BLOCK, BYTES, HEAD_BITS, TABLE_BITS, Dtype, Placement
from specdec.engine.preflight.device import is_exported
from specdec.engine.preflight.dtype import dtype_of
from specdec.engine.preflight.weights import USUAL, Tensor, bytes_of, kept_format, tensors_of_model
from specdec.engine.working_memory import MAX_SESSIONS, attention_bytes, logits_bytes, row_bytes, start_bytes

FORMATS: dict[Dtype, str] = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""Storage formats of dtypes in safetensors."""

TORCH_PROCESS = 600_000_000
"""Bytes of a serving process that has imported torch, transformers and Numba and compiled its loops."""

ONNX_PROCESS = 200_000_000
"""Bytes of a process running an exported model, without torch."""

EXPORTING_PROCESS = 700_000_000
"""Bytes of the process that exports a model, besides its weights: torch and the exporter."""


GRAPH_COPIES = 2
"""Copies of a graph's weights: its own, and ONNX Runtime's, laid out for products."""

EXPORT_COPIES = 1.3
"""Copies of the weights in float32 during an export: the model's, and a transposed one of the largest weight."""

SAMPLE_TOKENS = 384
"""Tokens of the sample text for comparing a quantised export with its model. Their logits are kept in memory."""

MIN_QUANTISED_BYTES = 200_000_000
"""Minimum bytes of weights in float32 for an export to try quantisation by default. Smaller weights stay in a
processor's cache, or are read in a few milliseconds."""

BLOCK_OVERHEAD = 5 / BLOCK
"""Additional bytes per number of a quantised weight: a float32 scale and a zero point for each block."""

FEWEST_BITS = 4
"""Bits of products in the smallest export that is quantised by default: no model that could start may be refused."""


@dataclass(frozen=True)
class MemoryNeeded:
    """The memory in bytes that a model needs on its device."""

    name: str
    dtype: str
    process: int
    weights: int  # as laid out, with copies of the output head
    working: int  # for the checks at start, and the largest step
    tokens: int
    kv: int
    export: int = 0  # during the export, besides the process, before the rest is allocated
    bits: int | None = None  # of a quantised weight
    narrowable: bool = True  # whether --dtype bfloat16 is possible, and shrinks the weights

    @property
    def kept_as(self) -> str:
        """The form of the weights in memory."""
        return self.dtype if self.bits is None else f"{self.bits} bits"

    @property
    def total(self) -> int:
        return self.process + max(self.export, self.weights + self.working + self.kv)

    @property
    def owed(self) -> tuple[int, int]:
        """The bytes that another model's KV cache must leave free for this one: a fixed number, and a number per slot
        of that cache."""
        return self.weights + self.working, self.kv // self.tokens if self.tokens else 0

    @property
    def remedy(self) -> str:
        """Advice to the user."""
        if self.kv > self.weights:
            return "use fewer --kv-tokens"
        return "use --dtype bfloat16" if self.dtype == "float32" and self.narrowable else "use a smaller model"

    def __str__(self) -> str:
        beside = [
            f"{in_gigabytes(count)} for {what}"
            for count, what in ((self.working, "checks and steps"), (self.process, "the process"))
            if count
        ]
        exported = f", {in_gigabytes(self.export)} while it is exported" if self.export else ""
        kv = f", {in_gigabytes(self.kv)} for {self.tokens} tokens of keys and values" if self.tokens else ""
        return (
            f"{self.name} needs {in_gigabytes(self.weights)} for weights in {self.kept_as}{kv}"
            f"{''.join(f', {need}' for need in beside)}{exported}"
        )


def in_gigabytes(count: int) -> str:
    return f"{count / 1e9:.3g} GB"


def memory_needed(directory: ModelDirectory, placement: Placement, free: int | None = None) -> MemoryNeeded:
    """Return the memory that a model needs as placed. Without `free`, it is the minimum for a start. On a device with
    `free` bytes, it is the total with the default number of slots and the maximum number of sessions."""
    dtype = dtype_of(directory, placement)
    if placement.kind == "onnx" and not is_exported(directory, placement):
        cached = place_of_export(directory, dtype, quantised=placement.may_quantise)
        directory = directory if what_is_broken(cached) else ModelDirectory(cached)
    exported = is_exported(directory, placement)
    numbers = _numbers_of_an_export(directory) if exported else numbers_of_a_token(directory)
    slot = numbers * BYTES[dtype]
    if free is None or placement.kv_tokens is not None:
        longest = min(directory.context, placement.kv_tokens or MIN_SLOTS)
    else:
        longest = directory.context
    parts = _parts(directory, placement, dtype, longest, exported=exported)
    tokens, sessions = placement.kv_tokens or MIN_SLOTS, 0
    if free is not None:
        if placement.kv_tokens is None and slot:
            rest, wanted = free - parts.process - parts.weights, slots_wanted(directory.context, placement.device)
            tokens = max(MIN_SLOTS, slots_within(rest, slot, wanted, parts.working(0), parts.row))
        sessions = min(placement.sessions or MAX_SESSIONS, tokens // HASHED_TOKENS)
    return MemoryNeeded(
        directory.name,
        dtype,
        0 if placement.beside else parts.process,
        parts.weights,
        parts.working(sessions),
        tokens,
        tokens * slot,
        parts.export,
        parts.bits,
        narrowable=placement.kind != "onnx" and parts.bits is None and directory.quantisation is None,
    )


class _Parts(NamedTuple):
    """The needs that do not depend on the numbers of slots and sessions, in bytes except `vocabulary` and `bits`."""

    weights: int
    process: int = 0
    start: int = 0
    export: int = 0
    vocabulary: int = 0  # logits per row; 0 if they are not in the process's memory
    attention: int = 0
    bits: int | None = None

    @property
    def row(self) -> int:
        return row_bytes(self.vocabulary)

    def working(self, sessions: int) -> int:
        return max(self.start, logits_bytes(self.vocabulary, sessions) + self.attention)


def _parts(directory: ModelDirectory, placement: Placement, dtype: Dtype, longest: int, *, exported: bool) -> _Parts:
    vocabulary, on_cpu, width = directory.vocabulary, placement.device == "cpu", BYTES[dtype]
    size = AttentionSize.of(directory)
    attention = attention_bytes(longest, 2 * size.kv_heads * size.width * width, size.heads * BYTES["float32"])
    if exported:
        graph = sum(file.stat().st_size for file in directory.weights() if ".onnx" in file.name)
        if not on_cpu:
            return _Parts(graph, attention=attention)
        return _Parts(GRAPH_COPIES * graph, ONNX_PROCESS, vocabulary=vocabulary, attention=attention)
    plain = directory.quantisation is None
    weights = bytes_of(directory, width if plain else None)
    if placement.kind == "vllm":
        return _Parts(weights)
    if not on_cpu:
        return _Parts(weights, start=_partials(directory, placement.kv_tokens) if placement.kind == "torch" else 0)
    if placement.kind == "onnx":
        quantised = placement.may_quantise and weights >= MIN_QUANTISED_BYTES
        graph = graph_bytes(directory, dtype, quantised=quantised)
        export = EXPORTING_PROCESS + int(EXPORT_COPIES * weights)
        export += SAMPLE_TOKENS * vocabulary * BYTES["float32"] if quantised else 0
        bits = FEWEST_BITS if quantised else None
        return _Parts(GRAPH_COPIES * graph, ONNX_PROCESS, 0, export, vocabulary, attention, bits)
    found = [tensor for tensor in tensors_of_model(directory) if tensor["dtype"] in USUAL]
    if (bits := BITS[placement.weights]) is not None:
        laid_out = _in_blocks(found, vocabulary, bits, HEAD_BITS, width)
        start = _largest_in_float32(found) + max(0, _converted(directory, found, dtype) - laid_out)
        return _Parts(laid_out, TORCH_PROCESS, start, vocabulary=vocabulary, bits=bits)
    laid_out = weights + _head(found, vocabulary, width)
    start = start_bytes(vocabulary, *_largest(found, vocabulary, width)) if plain else 0
    return _Parts(laid_out, TORCH_PROCESS, start, vocabulary=vocabulary)


def _partials(directory: ModelDirectory, kv_tokens: int | None) -> int:
    """Return the bytes of attention's partials on a GPU; 0 if unknown from the configuration."""
    size = AttentionSize.of(directory)
    partials = partials_for(min(directory.context, kv_tokens or 0))
    return partials * numbers_of_a_partial(size.heads, size.width) * BYTES["float32"] if size.width else 0


def _head(found: Iterable[Tensor], vocabulary: int, width: int) -> int:
    """Return the bytes of a float32 output head beyond the stored weights: a full copy if the token embeddings are also
    the head, else the additional width of float32."""
    tables = [math.prod(tensor["shape"]) for tensor in found if _is_of_vocabulary(tensor, vocabulary)]
    if not tables:
        return 0
    return tables[0] * BYTES["float32"] if len(tables) == 1 else tables[0] * (BYTES["float32"] - width)


def graph_bytes(directory: ModelDirectory, dtype: Dtype, *, quantised: bool) -> int:
    """Return the bytes of the weights that an export on first use would have. Its output head is a tensor of its own,
    also if the token embeddings are the head."""
    found = [tensor for tensor in tensors_of_model(directory) if tensor["dtype"] in USUAL]
    vocabulary, width = directory.vocabulary, BYTES[dtype]
    if not quantised:
        weights = bytes_of(directory, width if directory.quantisation is None else None)
        return weights + _head(found, vocabulary, width)
    widths = [tensor["shape"][1] for tensor in found if _is_of_vocabulary(tensor, vocabulary)]
    fits = all(columns % BLOCK == 0 for columns in widths)  # else the table stays as it is
    return _in_blocks(
        found, vocabulary, FEWEST_BITS, FEWEST_BITS, TABLE_BITS / 8 + BLOCK_OVERHEAD if fits else BYTES["float32"]
    )


def _in_blocks(found: Iterable[Tensor], vocabulary: int, bits: int, head_bits: int, table_width: float) -> int:
    """Return the bytes of weights with products quantised to `bits`, an output head of `head_bits`, and token
    embeddings of `table_width` bytes a number."""
    shapes = [tensor["shape"] for tensor in found if len(tensor["shape"]) == 2]
    products = sum(math.prod(shape) for shape in shapes if shape[0] != vocabulary)
    table = max((math.prod(shape) for shape in shapes if shape[0] == vocabulary), default=0)
    head_width = head_bits / 8 + BLOCK_OVERHEAD
    return int(products * (bits / 8 + BLOCK_OVERHEAD) + table * (head_width + table_width))


def _converted(directory: ModelDirectory, found: Iterable[Tensor], dtype: Dtype) -> int:
    """Return the bytes of weights that are converted when they are loaded, before the first is quantised; the others
    are mapped from their files."""
    if kept_format(directory, dtype) is not None:
        return 0
    return sum(math.prod(tensor["shape"]) * BYTES[dtype] for tensor in found if FORMATS[dtype] != tensor["dtype"])


def _largest_in_float32(found: Iterable[Tensor]) -> int:
    """Return twice the bytes of the largest tensor in float32, needed while it is quantised."""
    return 2 * BYTES["float32"] * max((math.prod(tensor["shape"]) for tensor in found), default=0)


def _largest(found: Iterable[Tensor], vocabulary: int, width: int) -> tuple[int, int, int]:
    """Return the inputs of an output head, the bytes of the largest layer, and the largest dimension of a layer, an
    upper bound on outputs."""
    hidden = next((tensor["shape"][1] for tensor in found if _is_of_vocabulary(tensor, vocabulary)), 0)
    layers = [
        tensor["shape"] for tensor in found if len(tensor["shape"]) == 2 and not _is_of_vocabulary(tensor, vocabulary)
    ]
    return (
        hidden,
        max((math.prod(shape) * width for shape in layers), default=0),
        max((max(shape) for shape in layers), default=0),
    )


def _is_of_vocabulary(tensor: Tensor, vocabulary: int) -> bool:
    return len(tensor["shape"]) == 2 and tensor["shape"][0] == vocabulary


def _numbers_of_an_export(directory: ModelDirectory) -> int:
    """Return how many numbers a token's keys and values have in an exported model."""
    description = read_fields(directory.path / DESCRIPTION) or Fields(directory.path, {})
    try:
        return sum(heads * (key + value) for heads, key, value in description.content.get("pools") or [])
    except (TypeError, ValueError):  # damaged: loading reports it
        return 0


def numbers_of_a_token(directory: ModelDirectory) -> int:
    """Return how many numbers a token's keys and values have in all layers; 0 if unknown from the configuration."""
    size = AttentionSize.of(directory)
    return 2 * size.layers * size.kv_heads * size.width
