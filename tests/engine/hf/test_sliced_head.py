"""An output head in vocabulary slices gives the logits of a single product."""

from __future__ import annotations

import weakref

import pytest
import torch

from specdec.engine.hf.linear import Float32Head, PackedLinear, SlicedHead, can_pack, lay_out
from specdec.engine.working_memory import MAX_SLICE_IDS

IDS = 2 * MAX_SLICE_IDS + 77


def head(dtype: torch.dtype, *, bias: bool) -> torch.nn.Linear:
    generator = torch.Generator().manual_seed(0)
    made = torch.nn.Linear(16, IDS, bias=bias)
    for parameter in made.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    return made.to(dtype)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_slices_give_the_same_logits(dtype: torch.dtype, bias: bool) -> None:
    own = head(dtype, bias=bias)
    hidden = torch.randn(5, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    sliced = SlicedHead(own)
    assert len(sliced.slices) == 3
    torch.testing.assert_close(sliced(hidden), Float32Head(own)(hidden))
    lay_out(sliced, PackedLinear if can_pack(torch.float32) else None)
    torch.testing.assert_close(sliced(hidden), Float32Head(own)(hidden))
    assert sliced(hidden[None]).shape == (1, 5, IDS)


def test_a_slice_is_freed_once_it_is_laid_out() -> None:
    """All slices together would take the memory of a second head."""
    if not can_pack(torch.float32):
        pytest.skip("this torch has no prepacked products")
    sliced = SlicedHead(head(torch.bfloat16, bias=False))
    before = [weakref.ref(part) for part in sliced.slices]
    left: list[int] = []
    for part in sliced.slices:  # freed one after the other, in order
        weakref.finalize(part, lambda: left.append(sum(other() is not None for other in before)))
    del part
    lay_out(sliced, PackedLinear)
    assert left == [2, 1, 0]
    assert all(isinstance(part, PackedLinear) for part in sliced.slices)
