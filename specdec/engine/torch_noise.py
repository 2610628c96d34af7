"""`specdec.decoding.noise` in torch, for logits that live on a device: the same 64-bit words.

torch has no unsigned 64-bit arithmetic, but signed arithmetic wraps the same way; only the right shifts
must be told not to carry the sign along.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.decoding import noise


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word


def _shift(value: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def words(seed: int, position: int, ids: Tensor) -> Tensor:
    """int64 [n], the bits of `noise.words`: the raw word of each token id at an absolute position."""
    value = ids.to(torch.int64) + _signed((noise.stream(seed, position) + noise.GAMMA) & noise.MASK)
    value = (value ^ _shift(value, 30)) * _signed(noise.MULTIPLY_1)
    value = (value ^ _shift(value, 27)) * _signed(noise.MULTIPLY_2)
    return value ^ _shift(value, 31)


def gumbel(seed: int, position: int, ids: Tensor) -> Tensor:
    """float64 [n]: standard Gumbel noise of each token id at an absolute position; equal to
    `noise.gumbel` to an ulp, since logarithms differ between libraries."""
    uniform = (_shift(words(seed, position, ids), 12).to(torch.float64) + 0.5) * 2.0**-52
    return -torch.log(-torch.log(uniform))
