"""How much memory a model takes at least: its weights, by the headers of their files, and the least KV memory.

What cannot be told from headers and configuration is left out, so that no start is refused that would succeed.
"""

from __future__ import annotations

from dataclasses import dataclass

from specdec.engine.memory import LEAST_SLOTS
from specdec.engine.model_directory import DESCRIPTION, GRAPH, ModelDirectory
from specdec.engine.model_file import Fields, is_integer, read_fields
from specdec.engine.placement import BYTES, Placement
from specdec.engine.preflight.dtype import dtype_of
from specdec.engine.preflight.weights import bytes_of

LARGEST_SIZE = 1 << 20
"""The largest number of layers, heads or widths that is believed."""


@dataclass(frozen=True)
class MemoryNeeded:
    """The least memory that a model takes on its device."""

    name: str
    dtype: str
    weights: int  # bytes
    tokens: int
    kv: int  # bytes

    @property
    def total(self) -> int:
        return self.weights + self.kv

    @property
    def remedy(self) -> str:
        """What the user may change."""
        if self.kv > self.weights:
            return "give fewer --kv-tokens"
        return "say --dtype bfloat16" if self.dtype == "float32" else "take a smaller model"

    def __str__(self) -> str:
        return (
            f"{self.name} needs {in_gigabytes(self.weights)} for weights in {self.dtype} and {in_gigabytes(self.kv)} "
            f"for {self.tokens} tokens of keys and values"
        )


def in_gigabytes(count: int) -> str:
    return f"{count / 1e9:.3g} GB"


def memory_needed(directory: ModelDirectory, placement: Placement) -> MemoryNeeded:
    """Return the least memory that a model takes as it is placed."""
    tokens = placement.kv_tokens or LEAST_SLOTS
    dtype = dtype_of(directory, placement)
    if placement.kind == "onnx" and (directory.path / GRAPH).is_file():
        weights = sum(file.stat().st_size for file in directory.weights() if ".onnx" in file.name)
        numbers = _numbers_of_an_export(directory)
    else:
        weights = bytes_of(directory, BYTES[dtype] if directory.quantisation is None else None)
        numbers = numbers_of_a_token(directory)
    kv = tokens * numbers * BYTES[dtype]
    return MemoryNeeded(directory.name, dtype, int(weights * placement.share), tokens, int(kv * placement.share))


def _numbers_of_an_export(directory: ModelDirectory) -> int:
    """Return the numbers that a token's keys and values have in an exported model."""
    description = read_fields(directory.path / DESCRIPTION) or Fields(directory.path, {})
    try:
        return sum(heads * (key + value) for heads, key, value in description.content.get("pools") or [])
    except (TypeError, ValueError):  # damaged: loading says so
        return 0


def numbers_of_a_token(directory: ModelDirectory) -> int:
    """Return the numbers that a token's keys and values have in all layers; 0 if the configuration does not tell."""
    config = Fields(directory.path, directory.config)

    def size(*names: str) -> int:
        found = (config.content.get(name) for name in names)
        return next((value for value in found if is_integer(value, 1, LARGEST_SIZE)), 0)

    heads = size("num_attention_heads", "n_head")
    width = size("head_dim") or (size("hidden_size", "n_embd") // heads if heads else 0)
    if config.has("kv_lora_rank"):  # keys and values have widths of their own
        width = 0
    return 2 * size("num_hidden_layers", "n_layer") * (size("num_key_value_heads") or heads) * width
