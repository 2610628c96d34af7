"""Gumbel noise on the GPU: `specdec.decoding.noise` in torch, with the same 64-bit words.

torch has no unsigned 64-bit arithmetic, but signed arithmetic wraps the same way. Only right shifts need a mask, since
they would extend the sign.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.decoding import noise


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word


def _shift(value: Tensor, bits: int) -> Tensor:
    """Return an int64 tensor shifted right, zero-filled."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def token_words(streams: Tensor, ids: Tensor) -> Tensor:
    """Return the raw word of each token id in each stream, as int64 with the bits of `noise.token_words`, in the
    broadcast shape of both."""
    value = streams + _signed(noise.GAMMA) + ids
    value = (value ^ _shift(value, 30)) * _signed(noise.MULTIPLY_1)
    value = (value ^ _shift(value, 27)) * _signed(noise.MULTIPLY_2)
    return value ^ _shift(value, 31)


def gumbel(streams: Tensor, ids: Tensor) -> Tensor:
    """Return the standard Gumbel noise of each token id in each stream, in float64. It is within an ulp of
    `noise.word_gumbel`, since logarithms differ between libraries."""
    uniform = (_shift(token_words(streams, ids), 12).to(torch.float64) + 0.5) * 2.0**-52
    return -torch.log(-torch.log(uniform))
