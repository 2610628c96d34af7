"""Parts of the decoder layers of heads: RMS norms, rotary embeddings and the gated MLP, as in Llama and Qwen3."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.engine.heads.files import HeadsFilesError
from specdec.engine.model_file import in_one_line


class Rotary(NamedTuple):
    """Rotary embeddings (Su et al. 2021, "RoFormer"), pairing the two halves of a head."""

    frequencies: Tensor  # float32 [width / 2]
    scale: float  # of cosines and sines

    @classmethod
    def of(cls, fields: Mapping[str, Any], width: int, path: Path, device: str) -> Rotary:
        """Return the rotary embeddings of attention heads of this width, from their fields in transformers' form.
        HeadsFilesError, naming the heads' path, if transformers rejects the fields, or if they rotate only a part of a
        head."""
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        try:
            made = LlamaRotaryEmbedding(LlamaConfig(**fields))
        except Exception as error:  # transformers' errors have no common base
            raise HeadsFilesError(f"{path}: config.json: rotary embeddings: {in_one_line(error)}") from error
        if 2 * len(made.inv_freq) != width:
            raise HeadsFilesError(
                f"{path}: config.json: rotary embeddings rotate {2 * len(made.inv_freq)} of a head's {width} "
                "numbers, must rotate all"
            )
        return cls(made.inv_freq.to(device), float(made.attention_scaling))

    def rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return x [..., heads, width], rotated by positions [...]."""
        angles = positions[..., None, None].float() * self.frequencies
        cos, sin = angles.cos() * self.scale, angles.sin() * self.scale
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return the RMS norm of the last axis (Zhang and Sennrich 2019), computed in float32."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return weight * (wide * scale).to(x.dtype)


def gated_mlp(x: Tensor, gate_and_up: Tensor, down: Tensor) -> Tensor:
    """Return the SwiGLU MLP (Shazeer 2020) of x [..., d], with weights [2 inner, d] and [d, inner]."""
    gate, up = F.linear(x, gate_and_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, down)


def in_heads(projected: Tensor, width: int) -> Tensor:
    """Return projections [..., heads * width] as [..., heads, width]."""
    *rows, columns = projected.shape
    return projected.reshape(*rows, columns // width, width)  # -1 would be ambiguous without rows
