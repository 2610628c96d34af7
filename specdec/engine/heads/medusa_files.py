"""Files of Medusa heads, in the three layouts in which heads are published. `specdec train-heads` writes vLLM's.

| Layout | Files | Tensors |
|---|---|---|
| FasterDecoding's heads | `medusa_lm_head.safetensors` or `.pt` | `{i}.{l}.linear.weight`, `.bias`; `{i}.{L}.weight` |
| FasterDecoding's models of Medusa-2 | `*.safetensors`, beside the target's own | the same, prefixed `medusa_head.` |
| vLLM's | `model.safetensors` | `blocks.{i}.layers.{l}.weight`; `lm_heads.{i}.weight` or one `lm_head.weight` |

i numbers the heads, l the blocks of a head; the last tensor of a head is its output head. The shapes in the file
headers are checked before weights are read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from specdec.engine.heads.files import MAX_LOGITS, HeadsFilesError, Reader, Stored, TargetShape, stored_tensors
from specdec.engine.model_file import Fields, read_fields
from specdec.engine.placement import BYTES, Dtype
from specdec.engine.preflight.memory_needed import MemoryNeeded

if TYPE_CHECKING:  # torch takes seconds to import, and headers are read without it
    import torch
    from torch import Tensor

    from specdec.engine.heads.medusa import MedusaHeads

MAX_HEADS, MAX_LAYERS = 32, 16
"""Maximum number of heads, and of residual blocks per head. Published files have 3 to 5 heads of one block."""


class HeadPart(NamedTuple):
    """The part of a set of heads stored in one tensor."""

    kind: str  # "weight" or "bias" (of a block), "output", or "ids"
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
"""Patterns of tensor names in all layouts, with the part that a match names."""


@dataclass(frozen=True)
class MedusaFiles:
    """Medusa heads in a directory, known from headers and configuration; their weights are not read yet."""

    architecture: ClassVar = "medusa"

    path: Path
    places: Mapping[HeadPart, Stored]
    heads: int
    layers: int
    scale: float

    @classmethod
    def of(cls, path: Path, target: TargetShape) -> MedusaFiles:
        """Find the heads in a directory, or in a file of weights; HeadsFilesError, naming the tensor and the sizes, if
        there are none for this target."""
        places = _places(path)
        config = read_fields((path if path.is_dir() else path.parent) / "config.json")
        numbers = {place.head for place in places if place.kind == "weight"}
        heads = len(numbers)
        layers = len({place.layer for place in places if place.kind == "weight"})
        if not heads:
            raise HeadsFilesError(
                f"{path}: has no heads: no tensors such as 0.0.linear.weight (Medusa) or fc.weight (EAGLE-3)"
            )
        if heads > MAX_HEADS or layers > MAX_LAYERS:
            raise HeadsFilesError(
                f"{path}: has {heads} heads of {layers} blocks, must have at most {MAX_HEADS} of {MAX_LAYERS}"
            )
        found = cls(path, places, heads, layers, _scale(config))
        found._check(target)
        return found

    def memory_needed(self, dtype: Dtype) -> MemoryNeeded:
        """Return the memory that the weights and a block of logits need beside the target's."""
        numbers = sum(stored.numbers for stored in self.places.values())
        logits = 2 * MAX_LOGITS * BYTES["float32"]
        return MemoryNeeded(f"heads {self.path.name}", dtype, 0, numbers * BYTES[dtype], logits, 0, 0)

    def load(
        self, target: TargetShape, output: Callable[[Tensor], Tensor], device: str, dtype: torch.dtype
    ) -> MedusaHeads:
        """Read the weights. `output`: the target's function from states [n, hidden] to logits, for heads without an
        output head."""
        import torch

        from specdec.engine.heads.medusa import MedusaHeads

        read = Reader()

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
            raise HeadsFilesError(
                f"{self.path}: token_map has ids from {int(ids.min())} to {int(ids.max())}, must have ids from 0 to "
                f"{target.vocabulary - 1}"
            )
        return MedusaHeads(stacked("weight"), biases, outputs, vocabulary=target.vocabulary, ids=ids, scale=self.scale)

    def _check(self, target: TargetShape) -> None:
        """Raise HeadsFilesError unless all tensors are there, in shapes that fit the target."""
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
            raise HeadsFilesError(f"{self.path}: has a token_map, but no output head for its {rows} tokens")
        for place, shape in wanted.items():
            stored = self.places.get(place)
            if stored is None:
                raise HeadsFilesError(f"{self.path}: head {place.head} lacks its {_words(place)}")
            stored.check(shape, f"a target of hidden size {d} with {target.vocabulary} token ids")
        for place, stored in self.places.items():
            if place not in wanted:
                raise HeadsFilesError(
                    f"{stored.file}: {stored.name} fits nowhere in {self.heads} heads of {self.layers} blocks"
                )


def _words(place: HeadPart) -> str:
    return "output head" if place.kind == "output" else f"{place.kind} of block {place.layer}"


def _scale(config: Fields | None) -> float:
    """Return the factor on the logits, vLLM's `logit_scale`; 1 if it is missing."""
    if config is None or not config.has("logit_scale"):
        return 1.0
    scale = config.number("logit_scale")
    if not scale > 0:
        raise config.refusal("logit_scale", "above 0")
    return scale


def _places(path: Path) -> dict[HeadPart, Stored]:
    """Return part -> tensor for the heads in a directory or file."""
    stored = stored_tensors(path)
    whole_model = any(tensor.name.startswith("medusa_head.") for tensor in stored)
    found: dict[HeadPart, Stored] = {}
    for tensor in stored:
        if whole_model and not tensor.name.startswith("medusa_head."):
            continue  # the target's own
        for pattern, place_of in PATTERNS:
            if match := pattern.fullmatch(tensor.name):
                place = place_of(match)
                if place in found:
                    raise HeadsFilesError(f"{path}: {found[place].name} and {tensor.name} are the same part")
                found[place] = tensor
    return found
