"""Files of heads: listing the tensors in a directory from the headers of its weight files, and reading them.

The kinds of heads are in `medusa_files.py`, `eagle3_files.py`, `block_files.py` and `mtp_files.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from specdec.engine.model_directory import WEIGHTS, ModelDirectory
from specdec.engine.model_file import Fields, ModelDirectoryError, in_one_line, opened
from specdec.engine.preflight.weights import tensors

if TYPE_CHECKING:  # torch takes seconds to import, and headers are read without it
    from torch import Tensor

LEGACY = "medusa_lm_head"
"""Name of the weight file of FasterDecoding's Medusa heads, without its suffix."""

PICKLED = "pytorch_model.bin"
"""Name of EAGLE's early weight files."""

HIDDEN_SIZE = "word_embed_proj_dim", "hidden_size", "n_embd"
"""Fields of config.json with the width of the output head's inputs; the first one present counts."""

STREAM = "hidden_size", "n_embd"
"""The same for the width of the residual stream."""

LAYERS = "num_hidden_layers", "n_layer"
"""The same for the number of layers."""

MAX_SIZE = 1 << 20


class HeadsFilesError(ModelDirectoryError):
    """Raised, with a one-line message, if a directory has no heads for the target."""


class TargetShape(NamedTuple):
    """The sizes of a target that its heads must fit."""

    hidden: int  # inputs of its output head
    vocabulary: int  # rows of its output head
    stream: int  # width of the residual stream between its layers
    layers: int

    @classmethod
    def of(cls, directory: ModelDirectory) -> TargetShape:
        """Return the sizes in a target's configuration; 0 for a size without a field."""
        config = Fields(directory.path, directory.config)

        def size(names: Iterable[str]) -> int:
            return next((config.integer(name, 1, MAX_SIZE) for name in names if config.has(name)), 0)

        return cls(size(HIDDEN_SIZE), directory.vocabulary, size(STREAM), size(LAYERS))


class Stored(NamedTuple):
    """A tensor in a file."""

    file: Path
    name: str
    shape: tuple[int, ...]

    @property
    def numbers(self) -> int:
        return math.prod(self.shape)

    def check(self, shape: tuple[int, ...], wanted_by: str) -> None:
        """Raise HeadsFilesError unless the tensor has this shape. `wanted_by`: what it must fit, for the message."""
        if self.shape != shape:
            raise HeadsFilesError(
                f"{self.file}: {self.name} has the shape {list(self.shape)}, must have {list(shape)} for {wanted_by}"
            )


def stored_tensors(path: Path) -> list[Stored]:
    """Return the tensors of a directory's weight files, or of a file of weights; HeadsFilesError if there is no such
    file."""
    return [tensor for file in _files(path) for tensor in _tensors(file)]


def _files(path: Path) -> list[Path]:
    """Return the weight files of a directory. A file with FasterDecoding's name, or else with transformers' name for a
    single file, is returned alone, since an unfinished training run keeps its state beside it."""
    if not path.is_dir():
        if not path.exists():
            raise HeadsFilesError(f"{path}: there is no such file or directory")
        return [path]
    for name in (f"{LEGACY}.safetensors", f"{LEGACY}.pt", WEIGHTS):
        if (path / name).exists():
            return [path / name]
    files = sorted(path.glob("*.safetensors")) or sorted(path.glob(PICKLED))
    if not files:
        raise HeadsFilesError(f"{path}: has neither {LEGACY}.safetensors, {LEGACY}.pt, *.safetensors nor {PICKLED}")
    return files


def _tensors(file: Path) -> Iterator[Stored]:
    if _is_pickled(file):
        for name, tensor in _pickled(file).items():
            yield Stored(file, name, tuple(tensor.shape))
        return
    for name, entry in tensors(file).items():
        yield Stored(file, name, tuple(entry["shape"]))


def _is_pickled(file: Path) -> bool:
    return file.suffix in (".pt", ".bin")


def _pickled(file: Path) -> Mapping[str, Tensor]:
    """Return the tensors of a pickle, mapped from disk. With `weights_only`, torch builds only tensors and containers,
    and calls no other code named in the file."""
    import torch

    with opened(file):  # raises our error if the file cannot be opened
        pass
    try:
        found: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # pickle's and zipfile's errors have no common base
        raise HeadsFilesError(f"{file}: cannot be loaded: {in_one_line(error)}") from error
    if not isinstance(found, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in found.values()):
        raise HeadsFilesError(f"{file}: is not a dictionary of tensors")
    return {str(name): tensor for name, tensor in found.items()}


class Reader:
    """Reads tensors, opening each file once."""

    def __init__(self) -> None:
        self._open: dict[Path, Any] = {}

    def __call__(self, stored: Stored) -> Tensor:
        from safetensors import safe_open

        file = stored.file
        if file not in self._open:
            self._open[file] = _pickled(file) if _is_pickled(file) else safe_open(file, framework="pt")
        source = self._open[file]
        tensor: Tensor = source[stored.name] if isinstance(source, Mapping) else source.get_tensor(stored.name)
        return tensor
