"""Checks of a model directory before anything heavy is imported: that weights are complete, and how tokenizers differ.

Headers are read, weights are not.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from specdec.engine.model_directory import GRAPH, ModelDirectory, ModelDirectoryError
from specdec.engine.model_file import in_one_line, opened, read_fields

INDEX = "model.safetensors.index.json"
MOST_HEADER_BYTES = 100_000_000
"""Bytes of the largest header that the format allows."""


def check_models(target: Path, *drafts: Path) -> None:
    """Raise ModelDirectoryError unless all these models can be served and each draft can draft for the target."""
    directory = servable(target)
    for draft in drafts:
        servable(draft).check_pair(directory)


def servable(path: Path) -> ModelDirectory:
    """Return a model's directory; ModelDirectoryError unless its weights are complete."""
    directory = ModelDirectory(path)
    check_weights(directory)
    return directory


def check_weights(directory: ModelDirectory) -> None:
    """Raise ModelDirectoryError unless the files of weights are there, and each is as long as its header says."""
    files = directory.weights()
    if not files:
        raise ModelDirectoryError(f"{directory.path}: no weights (*.safetensors or {GRAPH})")
    index = read_fields(directory.path / INDEX)
    if index is not None:
        named = {name for name in index.fields("weight_map").content.values() if isinstance(name, str)}
        missing = sorted(named - {file.name for file in files})
        if missing:
            raise ModelDirectoryError(
                f"{index.file}: names {missing[0]}, which is not there ({len(missing)} of {len(named)} files missing)"
            )
    for file in files:
        if file.suffix == ".safetensors":
            _check_length(file)


def _check_length(file: Path) -> None:
    """Raise ModelDirectoryError unless a file of the format safetensors has all the bytes that its header tells of."""
    with opened(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, MOST_HEADER_BYTES):
            raise ModelDirectoryError(
                f"{file}: cannot be loaded: its header is cut off, or it is not a safetensors file"
            )
        try:
            header = json.loads(stream.read(length))
            ends = [int(entry["data_offsets"][1]) for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
            raise ModelDirectoryError(
                f"{file}: cannot be loaded: its header is damaged: {in_one_line(error)}"
            ) from error
    expected = 8 + length + max(ends, default=0)
    if size != expected:
        raise ModelDirectoryError(f"{file}: has {size} bytes, by its header they are {expected}: copy it again")
