"""Fusion: the first product of heads that read features. It joins a row's features from several depths into one vector.

If heads run in a draft service, the verifier needs only this part of them. A fused row, of the heads' width, takes a
few kilobytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.engine.heads.decoder_layer import rms_norm


@dataclass(frozen=True)
class Fusion:
    """W_fc [f^(1); ...; f^(m)] of a row's features, with the RMS norms that some heads have."""

    product: Tensor  # W_fc [d', m d]
    epsilon: float  # of the norms
    norm_of_each: Tensor | None = None  # [m, d] before the product, of each feature (EAGLE-3.1)
    norm_of_all: Tensor | None = None  # [m d] before the product, over all features
    norm_of_fused: Tensor | None = None  # [d'] after the product (block drafts)

    @property
    def width(self) -> int:
        """d', the number of elements of a fused row."""
        return self.product.shape[0]

    def __call__(self, features: Tensor) -> Tensor:
        """Return the fused rows [n, d'] of features [n, m, d] of any float dtype."""
        read = features.to(self.product.device, self.product.dtype)
        if self.norm_of_each is not None:
            read = rms_norm(read, self.norm_of_each, self.epsilon)
        joined = read.flatten(1)
        if self.norm_of_all is not None:
            joined = rms_norm(joined, self.norm_of_all, self.epsilon)
        fused = F.linear(joined, self.product)
        return fused if self.norm_of_fused is None else rms_norm(fused, self.norm_of_fused, self.epsilon)


def as_bytes(fused: Tensor) -> bytes:
    """Return fused rows as they are sent: bfloat16, little-endian, row by row."""
    return fused.to(torch.bfloat16).contiguous().view(torch.int16).cpu().numpy().astype("<i2", copy=False).tobytes()


def from_bytes(values: bytes, width: int) -> Tensor:
    """Return the fused rows [n, width], bfloat16, written by `as_bytes`. ValueError unless the bytes are one or more
    whole rows."""
    if not values or len(values) % (2 * width):
        raise ValueError(f"has {len(values)} bytes, must have rows of {2 * width} bytes")
    return torch.frombuffer(bytearray(values), dtype=torch.bfloat16).view(-1, width)
