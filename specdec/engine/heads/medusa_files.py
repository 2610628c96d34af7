"""Files of Medusa heads: the three layouts in which they are published, and the one that `specdec train-heads` writes.

| Layout | Files | Tensors |
|---|---|---|
| FasterDecoding's heads | `medusa_lm_head.safetensors` or `.pt` | `{i}.{l}.linear.weight`, `.bias`; `{i}.{L}.weight` |
| FasterDecoding's models of Medusa-2 | `*.safetensors`, beside the target's own | the same behind `medusa_head.` |
| vLLM's | `model.safetensors` | `blocks.{i}.layers.{l}.weight`; `lm_heads.{i}.weight` or one `lm_head.weight` |

i counts heads, l their blocks; the last tensor of a head is its output head. Everything is checked by the shapes in the
files' headers before weights are read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from specdec.engine.model_directory import ModelDirectory
from specdec.engine.model_file import Fields, ModelDirectoryError, in_one_line, opened, read_fields
from specdec.engine.placement import BYTES, Dtype
from specdec.engine.preflight.memory_needed import MemoryNeeded
from specdec.engine.preflight.weights import tensors

if TYPE_CHECKING:  # torch takes seconds to import, and headers are read without it
    import torch
    from torch import Tensor

    from specdec.engine.heads.medusa import MedusaHeads

LEGACY = "medusa_lm_head"
"""Name of the weight file of FasterDecoding's heads, without its suffix."""

MAX_HEADS, MAX_LAYERS = 32, 16
"""Maximum heads, and residual blocks of a head. Published ones have 3 to 5 heads of one block."""


MAX_LOGITS = 1 << 22
"""Approximate number of logits that heads compute at once: one text's at least."""


class MedusaFilesError(ModelDirectoryError):
    """Raised, with a one-line message, if a directory has no Medusa heads for the target."""


class HeadPart(NamedTuple):
    """The part of a set of heads that is in one tensor."""

    kind: str  # weight, bias: of a block; output; ids
    head: int | None = None  # None: common to all heads
    layer: int | None = None  # of a block


PATTERNS: Sequence[tuple[re.Pattern[str], Callable[[re.Match[str]], HeadPart]]] = (
    (
        re.compile(r"(?:medusa_heads?\.)?(\d+)\.(\d+)\.linear\.(weight|bias)"),
        lambda found: HeadPart(found[3], int(found[1]), int(found[2])),
    ),
    (re.compile(r"(?:medusa_heads?\.)?(\d+)\.(\d+)\.weight"), lambda found: HeadPart("output", int(found[1]))),
    (
        re.compile(r"(?:medusa_heads\.)?blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)"),
        lambda found: HeadPart(found[3], int(found[1]), int(found[2])),
    ),
    (re.compile(r"(?:medusa_heads\.)?lm_heads\.(\d+)\.weight"), lambda found: HeadPart("output", int(found[1]))),
    (re.compile(r"(?:medusa_heads\.)?lm_head\.weight"), lambda _: HeadPart("output")),
    (re.compile(r"(?:medusa_heads\.)?token_map"), lambda _: HeadPart("ids")),
)
"""Names of tensors in all layouts, to what they are."""


HIDDEN_SIZE = "word_embed_proj_dim", "hidden_size", "n_embd"
"""Fields of config.json with the width of the output head's inputs; the first one there counts."""

MAX_SIZE = 1 << 20


class TargetShape(NamedTuple):
    """The sizes of a target that its heads must fit."""

    hidden: int
    vocabulary: int  # rows of its output head

    @classmethod
    def of(cls, directory: ModelDirectory) -> TargetShape:
        """Return the sizes by a target's configuration."""
        config = Fields(directory.path, directory.config)
        hidden = next((config.integer(name, 1, MAX_SIZE) for name in HIDDEN_SIZE if config.has(name)), 0)
        return cls(hidden, directory.vocabulary)


class Stored(NamedTuple):
    """A tensor in a file."""

    file: Path
    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class MedusaFiles:
    """Medusa heads in a directory, judged by headers and configuration; their weights are not read yet."""

    path: Path
    places: Mapping[HeadPart, Stored]
    heads: int
    layers: int
    scale: float

    @classmethod
    def of(cls, path: Path, target: TargetShape) -> MedusaFiles:
        """Find the heads in a directory, or in a file of weights; MedusaFilesError, naming the tensor and the sizes, if
        there are none for this target."""
        places = _places(path)
        config = read_fields((path if path.is_dir() else path.parent) / "config.json")
        numbers = {place.head for place in places if place.kind == "weight"}
        heads = len(numbers)
        layers = len({place.layer for place in places if place.kind == "weight"})
        if not heads:
            raise MedusaFilesError(f"{path}: has no Medusa heads: no tensors such as 0.0.linear.weight")
        if heads > MAX_HEADS or layers > MAX_LAYERS:
            raise MedusaFilesError(
                f"{path}: has {heads} heads of {layers} blocks, must have at most {MAX_HEADS} of {MAX_LAYERS}"
            )
        found = cls(path, places, heads, layers, _scale(config))
        found._check(target)
        return found

    def memory_needed(self, dtype: Dtype) -> MemoryNeeded:
        """Return the memory of the weights and of a block of logits, beside the target's."""
        numbers = sum(math.prod(stored.shape) for stored in self.places.values())
        logits = 2 * MAX_LOGITS * BYTES["float32"]
        return MemoryNeeded(f"heads {self.path.name}", dtype, 0, numbers * BYTES[dtype], logits, 0, 0)

    def load(
        self, target: TargetShape, output: Callable[[Tensor], Tensor], device: str, dtype: torch.dtype
    ) -> MedusaHeads:
        """Read the weights. `output`: the target's function from states [n, hidden] to logits, for heads without an
        output head."""
        import torch

        from specdec.engine.heads.medusa import MedusaHeads

        read = _Reader()

        def stacked(part: str) -> Tensor:
            rows = [
                torch.stack([read(self.places[HeadPart(part, head, layer)]) for layer in range(self.layers)])
                for head in range(self.heads)
            ]
            return torch.stack(rows).to(device, dtype)

        biases = stacked("bias") if HeadPart("bias", 0, 0) in self.places else None
        outputs: Tensor | Callable[[Tensor], Tensor] = output
        if HeadPart("output", 0) in self.places:
            stored = [read(self.places[HeadPart("output", head)]) for head in range(self.heads)]
            outputs = torch.stack(stored).to(device, dtype)
        elif HeadPart("output") in self.places:
            outputs = read(self.places[HeadPart("output")]).to(device, dtype)
        ids = read(self.places[HeadPart("ids")]).to(device, torch.int64) if HeadPart("ids") in self.places else None
        if ids is not None and not 0 <= int(ids.min()) <= int(ids.max()) < target.vocabulary:
            raise MedusaFilesError(
                f"{self.path}: token_map has ids from {int(ids.min())} to {int(ids.max())}, must have ids from 0 to "
                f"{target.vocabulary - 1}"
            )
        return MedusaHeads(stacked("weight"), biases, outputs, vocabulary=target.vocabulary, ids=ids, scale=self.scale)

    def _check(self, target: TargetShape) -> None:
        """Raise MedusaFilesError unless all tensors are there, in shapes that fit the target."""
        d = target.hidden
        blocks = [(head, layer) for head in range(self.heads) for layer in range(self.layers)]
        wanted: dict[HeadPart, tuple[int, ...]] = {HeadPart("weight", *block): (d, d) for block in blocks}
        if any(place.kind == "bias" for place in self.places):
            wanted |= {HeadPart("bias", *block): (d,) for block in blocks}
        rows = target.vocabulary
        if (ids := self.places.get(HeadPart("ids"))) is not None:
            rows = ids.shape[0] if len(ids.shape) == 1 else -1
            wanted[HeadPart("ids")] = (max(rows, 1),)
        if HeadPart("output") in self.places:
            wanted[HeadPart("output")] = (rows, d)
        elif any(place.kind == "output" for place in self.places):
            wanted |= {HeadPart("output", head): (rows, d) for head in range(self.heads)}
        elif ids is not None:
            raise MedusaFilesError(f"{self.path}: has a token_map, but no output head for its {rows} tokens")
        for place, shape in wanted.items():
            stored = self.places.get(place)
            if stored is None:
                raise MedusaFilesError(f"{self.path}: head {place.head} lacks its {_words(place)}")
            if stored.shape != shape:
                raise MedusaFilesError(
                    f"{stored.file}: {stored.name} has the shape {list(stored.shape)}, must have {list(shape)} for a "
                    f"target of hidden size {d} with {target.vocabulary} token ids"
                )
        for place, stored in self.places.items():
            if place not in wanted:
                raise MedusaFilesError(
                    f"{stored.file}: {stored.name} fits nowhere in {self.heads} heads of {self.layers} blocks"
                )


def _words(place: HeadPart) -> str:
    return "output head" if place.kind == "output" else f"{place.kind} of block {place.layer}"


def _scale(config: Fields | None) -> float:
    """Return vLLM's `logit_scale`."""
    if config is None or not config.has("logit_scale"):
        return 1.0
    scale = config.number("logit_scale")
    if not scale > 0:
        raise config.refusal("logit_scale", "above 0")
    return scale


def memory_of_heads(path: Path, directory: ModelDirectory, dtype: Dtype) -> MemoryNeeded:
    """Return the memory of heads beside a target's weights; MedusaFilesError if they do not fit the target."""
    return MedusaFiles.of(path, TargetShape.of(directory)).memory_needed(dtype)


def _places(path: Path) -> dict[HeadPart, Stored]:
    """Return the tensors of heads in a directory or file, by what they are."""
    stored = [tensor for file in _files(path) for tensor in _tensors(file)]
    whole_model = any(tensor.name.startswith("medusa_head.") for tensor in stored)
    found: dict[HeadPart, Stored] = {}
    for tensor in stored:
        if whole_model and not tensor.name.startswith("medusa_head."):
            continue  # the target's own
        for pattern, place_of in PATTERNS:
            if match := pattern.fullmatch(tensor.name):
                place = place_of(match)
                if place in found:
                    raise MedusaFilesError(f"{path}: {found[place].name} and {tensor.name} are the same part")
                found[place] = tensor
    return found


def _files(path: Path) -> list[Path]:
    """Return the files with weights of a directory; FasterDecoding's own come first, and alone."""
    if not path.is_dir():
        if not path.exists():
            raise MedusaFilesError(f"{path}: there is no such file or directory")
        return [path]
    for name in (f"{LEGACY}.safetensors", f"{LEGACY}.pt"):
        if (path / name).exists():
            return [path / name]
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise MedusaFilesError(f"{path}: has neither {LEGACY}.safetensors, {LEGACY}.pt nor another *.safetensors")
    return files


def _tensors(file: Path) -> Iterator[Stored]:
    if file.suffix == ".pt":
        for name, tensor in _pickled(file).items():
            yield Stored(file, name, tuple(tensor.shape))
        return
    for name, entry in tensors(file).items():
        yield Stored(file, name, tuple(entry["shape"]))


def _pickled(file: Path) -> Mapping[str, Tensor]:
    """Return the tensors of a .pt file, still on disk. `weights_only` builds tensors and containers, and calls nothing
    else that a file may name."""
    import torch

    with opened(file):
        pass
    try:
        found: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # pickle's and zipfile's errors have no common base
        raise MedusaFilesError(f"{file}: cannot be loaded: {in_one_line(error)}") from error
    if not isinstance(found, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in found.values()):
        raise MedusaFilesError(f"{file}: is not a dictionary of tensors")
    return {str(name): tensor for name, tensor in found.items()}


class _Reader:
    """Reads tensors, each file opened once."""

    def __init__(self) -> None:
        self._open: dict[Path, Any] = {}

    def __call__(self, stored: Stored) -> Tensor:
        from safetensors import safe_open

        if stored.file not in self._open:
            pickled = stored.file.suffix == ".pt"
            self._open[stored.file] = _pickled(stored.file) if pickled else safe_open(stored.file, framework="pt")
        source = self._open[stored.file]
        tensor: Tensor = source[stored.name] if isinstance(source, Mapping) else source.get_tensor(stored.name)
        return tensor
