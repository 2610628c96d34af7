"""Files of Medusa heads, in the three layouts in which heads are published. `specdec train-heads` writes vLLM's.

| Layout | Files | Tensors |
|---|---|---|
| FasterDecoding's heads | `medusa_lm_head.safetensors` or `.pt` | `{i}.{l}.linear.weight`, `.bias`; `{i}.{L}.weight` |
| FasterDecoding's models of Medusa-2 | `*.safetensors`, beside the target's own | the same, prefixed `medusa_head.` |
| vLLM's | `model.safetensors` | `blocks.{i}.layers.{l}.weight`; `lm_heads.{i}.weight` or one `lm_head.weight` |

The prefix may also be `medusa_heads.`. i numbers the heads, l the blocks of a head; the last tensor of a head is its
output head. The shapes in the file headers are checked before weights are read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from specdec.engine.heads.feature_files import parts_in
from specdec.engine.heads.files import HeadsFilesError, Reader, Stored, TargetShape, stored_tensors
from specdec.engine.model_file import Fields, read_fields
from specdec.engine.placement import BYTES, Dtype
from specdec.engine.preflight.memory_needed import MemoryNeeded

if TYPE_CHECKING:  # torch takes seconds to import, and headers are read without it
    import torch
    from torch import Tensor

    from specdec.engine.heads.medusa import MedusaHeads

MAX_HEADS, MAX_LAYERS = 32, 16
"""Maximum number of heads, and of residual blocks per head. Published files have 3 to 5 heads of one block."""

MAX_LOGITS = 1 << 22
"""Maximum logits of a pass, except that a pass has at least one text."""

BLOCK = re.compile(r"(\d+\.\d+\.linear|blocks\.\d+\.layers\.\d+)\.weight$")
"""Matches the end of a residual block's weight name; all Medusa files have such tensors."""

WHOLE_MODEL = "medusa_head."
"""Prefix of the heads' tensors beside the target's own."""

LAYOUTS: Sequence[Mapping[str, str]] = [
    {part: prefix + name for part, name in names.items()}
    for prefix in ("", WHOLE_MODEL, "medusa_heads.")
    for names in (
        {"weight": "{}.{}.linear.weight", "bias": "{}.{}.linear.bias", "output": "{}.{}.weight"},
        {
            "weight": "blocks.{}.layers.{}.weight",
            "bias": "blocks.{}.layers.{}.bias",
            "output": "lm_heads.{}.weight",
            "shared_output": "lm_head.weight",
            "ids": "token_map",
        },
    )
]
"""Kind of part -> tensor name, in FasterDecoding's layout and in vLLM's, each without a prefix and with both. {} stands
for the numbers of head and block; FasterDecoding's output head has the number after the last block's."""


@dataclass(frozen=True)
class MedusaFiles:
    """Medusa heads in a directory, known from headers and configuration; their weights are not read yet."""

    architecture: ClassVar = "medusa"

    path: Path
    parts: Mapping[str, Stored]
    heads: int
    layers: int
    scale: float
    target: TargetShape

    @classmethod
    def of(cls, path: Path, target: TargetShape) -> MedusaFiles:
        """Find the heads in a directory, or in a file of weights; HeadsFilesError, naming the tensor and the sizes, if
        there are none for this target."""
        stored = stored_tensors(path)
        stored = [tensor for tensor in stored if tensor.name.startswith(WHOLE_MODEL)] or stored
        if not any(BLOCK.search(tensor.name) for tensor in stored):
            raise HeadsFilesError(
                f"{path}: has no heads: no tensors such as 0.0.linear.weight (Medusa) or fc.weight (EAGLE-3)"
            )
        parts = parts_in(stored, LAYOUTS, "Medusa heads")
        blocks = [part.split() for part in parts if part.startswith("weight ")]
        heads, layers = len({head for _, head, _ in blocks}), len({layer for _, _, layer in blocks})
        if heads > MAX_HEADS or layers > MAX_LAYERS:
            raise HeadsFilesError(
                f"{path}: has {heads} heads of {layers} blocks, must have at most {MAX_HEADS} of {MAX_LAYERS}"
            )
        config = read_fields((path if path.is_dir() else path.parent) / "config.json")
        found = cls(path, parts, heads, layers, _scale(config), target)
        found._check()
        return found

    def memory_needed(self, dtype: Dtype, kv_tokens: int | None) -> MemoryNeeded:
        """Return the memory that the weights and a pass's logits need beside the target's. `kv_tokens` has no effect:
        it is for heads with attention."""
        numbers = sum(stored.numbers for stored in self.parts.values())
        logits = 2 * MAX_LOGITS * BYTES["float32"]
        return MemoryNeeded(f"heads {self.path.name}", dtype, 0, numbers * BYTES[dtype], logits, 0, 0)

    def load(self, output: Callable[[Tensor], Tensor], device: str, dtype: torch.dtype) -> MedusaHeads:
        """Read the weights. `output`: the target's function from states [n, hidden] to logits, for heads without an
        output head."""
        import torch

        from specdec.engine.heads.medusa import MedusaHeads

        read, vocabulary = Reader(), self.target.vocabulary

        def stacked(part: str) -> Tensor:
            rows = [
                torch.stack([read(self.parts[f"{part} {head} {layer}"]) for layer in range(self.layers)])
                for head in range(self.heads)
            ]
            return torch.stack(rows).to(device, dtype)

        biases = stacked("bias") if "bias 0 0" in self.parts else None
        outputs: Tensor | Callable[[Tensor], Tensor] = output
        if self._outputs:
            outputs = torch.stack([read(self.parts[part]) for part in self._outputs]).to(device, dtype)
        elif "shared_output" in self.parts:
            outputs = read(self.parts["shared_output"]).to(device, dtype)
        ids = read(self.parts["ids"]).to(device, torch.int64) if "ids" in self.parts else None
        if ids is not None and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
            raise HeadsFilesError(
                f"{self.path}: token_map has ids from {int(ids.min())} to {int(ids.max())}, must have ids from 0 to "
                f"{vocabulary - 1}"
            )
        return MedusaHeads(stacked("weight"), biases, outputs, vocabulary=vocabulary, ids=ids, scale=self.scale)

    @property
    def _outputs(self) -> list[str]:
        """The parts with each head's own output head, in either layout; an empty list if there are none."""
        numbers = [f"output {head}" for head in range(self.heads)]
        layouts = numbers, [f"{number} {self.layers}" for number in numbers]
        return next((parts for parts in layouts if not self.parts.keys().isdisjoint(parts)), [])

    def _check(self) -> None:
        """Raise HeadsFilesError unless all tensors are there, in shapes that fit the target."""
        d, vocabulary = self.target.hidden, self.target.vocabulary
        blocks = [f"{head} {layer}" for head in range(self.heads) for layer in range(self.layers)]
        wanted: dict[str, tuple[int, ...]] = {f"weight {block}": (d, d) for block in blocks}
        if any(part.startswith("bias ") for part in self.parts):
            wanted |= {f"bias {block}": (d,) for block in blocks}
        rows = vocabulary
        if (ids := self.parts.get("ids")) is not None:
            rows = ids.shape[0] if len(ids.shape) == 1 else -1
            wanted["ids"] = (max(rows, 1),)
        if "shared_output" in self.parts:
            wanted["shared_output"] = (rows, d)
        elif self._outputs:
            wanted |= dict.fromkeys(self._outputs, (rows, d))
        elif ids is not None:
            raise HeadsFilesError(f"{self.path}: has a token_map, but no output head for its {rows} tokens")
        for part, shape in wanted.items():
            if part not in self.parts:
                kind, head, *block = part.split()
                what = f"{kind} of block {block[0]}" if kind != "output" else "output head"
                raise HeadsFilesError(f"{self.path}: head {head} lacks its {what}")
            self.parts[part].check(shape, f"a target of hidden size {d} with {vocabulary} token ids")
        for part, stored in self.parts.items():
            if part not in wanted:
                raise HeadsFilesError(
                    f"{stored.file}: {stored.name} is unexpected in {self.heads} heads of {self.layers} blocks"
                )


def _scale(config: Fields | None) -> float:
    """Return the factor on the logits, vLLM's `logit_scale`; 1 if it is missing."""
    if config is None:
        return 1.0
    scale = config.number("logit_scale", default=1.0)
    if not scale > 0:
        raise config.refusal("logit_scale", "above 0")
    return scale
