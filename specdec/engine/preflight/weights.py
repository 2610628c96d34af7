"""Weight files, checked by their headers for completeness and contents. The weights are not read."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specdec.engine.attention_size import AttentionSize
from specdec.engine.model_directory import GIVE_GGUF, GRAPH, INDEX, WEIGHTS, WEIGHTS_FIELD, ModelDirectory
from specdec.engine.model_file import ModelDirectoryError, in_one_line, opened

Tensor = dict[str, Any]
"""A tensor's entry in a header: `dtype`, `shape`, `data_offsets`."""

MAX_HEADER_BYTES = 100_000_000
"""Maximum bytes of a header in this format."""

USUAL = frozenset({"F64", "F32", "F16", "BF16"})
"""Storage formats of weights that are not quantised."""

BEYOND_MODEL = re.compile(r"mtp\.|(?:model\.)?layers\.(\d+)\.")
"""Start of the names of tensors that may belong to MTP layers: these are stored beside the model's own layers, or after
them."""

EMBEDDINGS = (".embed_tokens.weight", "wte.weight", ".word_embeddings.weight")
"""Name suffixes of token embeddings: a row per id of the vocabulary."""


def check_weights(directory: ModelDirectory, *, by_transformers: bool = False) -> None:
    """Raise ModelDirectoryError unless the weight files exist with the lengths given by their headers, and token
    embeddings have a row for each id. Loading `by_transformers` also requires transformers' standard file names, or a
    name in config.json."""
    files = directory.weights()
    if not files:
        raise ModelDirectoryError(f"{directory.path}: no weights (*.safetensors or {GRAPH}){_other_format(directory)}")
    if by_transformers and not directory.names_weights:
        raise ModelDirectoryError(
            f"{directory.path}: neither {WEIGHTS} nor {INDEX}: {files[0].name} has a name that transformers does not "
            f"look for: set it in config.json ({WEIGHTS_FIELD})"
        )
    for file in files:
        if file.suffix == ".safetensors":
            for name, tensor in tensors(file).items():
                _check_vocabulary(directory, file, name, tensor)


def _check_vocabulary(directory: ModelDirectory, file: Path, name: str, tensor: Tensor) -> None:
    if name.endswith(EMBEDDINGS) and tensor["dtype"] in USUAL and len(tensor["shape"]) == 2:
        rows = tensor["shape"][0]
        if rows != directory.vocabulary:
            raise ModelDirectoryError(
                f"{file}: {name} has rows for {rows} token ids, must have {directory.vocabulary}, vocab_size in "
                "config.json"
            )


def bytes_of(directory: ModelDirectory, width: int | None) -> int:
    """Return the bytes of the model's weights. With `width`, numbers in the usual formats count `width` bytes each;
    integers and quantised weights count as stored."""
    total = 0
    for tensor in tensors_of_model(directory):
        start, end = tensor["data_offsets"]
        if width is not None and tensor["dtype"] in USUAL:
            total += math.prod(tensor["shape"]) * width
        else:
            total += end - start
    return total


def kept_format(directory: ModelDirectory, dtype: str) -> str | None:
    """Return the storage format of the weights, F16 or BF16, if they can stay mapped from their files and be converted
    one at a time when they are quantised; None if they are converted to `dtype` when they are loaded. Converting later
    changes no number, because float32 represents all numbers of both formats."""
    formats = {tensor["dtype"] for tensor in tensors_of_model(directory)}
    return formats.pop() if dtype == "float32" and len(formats) == 1 and formats <= {"F16", "BF16"} else None


def tensors_of_model(directory: ModelDirectory) -> Iterator[Tensor]:
    """Yield the header entries of all tensors but those of MTP layers, which are not loaded with the model."""
    layers = AttentionSize.of(directory).layers
    for file in directory.weights():
        if file.suffix == ".safetensors":
            for name, tensor in tensors(file).items():
                start = BEYOND_MODEL.match(name)
                if start is None or (start[1] is not None and (not layers or int(start[1]) < layers)):
                    yield tensor


def tensors(file: Path) -> dict[str, Tensor]:
    """Return the header entry of each tensor in a safetensors file: `dtype`, `shape`, `data_offsets`. Raises
    ModelDirectoryError unless the file has all the bytes that its header announces."""
    with opened(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise ModelDirectoryError(
                f"{file}: cannot be loaded: its header is truncated, or it is not a safetensors file"
            )
        try:
            header = json.loads(stream.read(length))
            tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
            ends = [int(entry["data_offsets"][1]) for entry in tensors.values()]
            for entry in tensors.values():
                str(entry["dtype"]), math.prod(map(int, entry["shape"]))
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
            raise ModelDirectoryError(
                f"{file}: cannot be loaded: its header is damaged: {in_one_line(error)}"
            ) from error
    expected = 8 + length + max(ends, default=0)
    if size != expected:
        raise ModelDirectoryError(f"{file}: has {size} bytes, must have {expected} by its header: copy it again")
    return tensors


def _other_format(directory: ModelDirectory) -> str:
    """Return the end of a message about weights in an unsupported format."""
    for file in sorted(directory.path.iterdir()):
        if file.suffix in (".bin", ".pt", ".pth"):
            return f"; {file.name} has another format: save the model as safetensors"
        if file.suffix == ".gguf":
            return f"; {file.name} has another format: {GIVE_GGUF}"
    return ""
