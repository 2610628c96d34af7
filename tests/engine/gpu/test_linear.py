"""Layers whose split-K depends on their shape alone: results are right, and rows do not depend on the batch size."""

from __future__ import annotations

import pytest
import torch

from specdec.engine.gpu import linear as gpu_linear
from specdec.engine.gpu.linear import SplitKLinear, parts_of, split_k
from specdec.engine.row_counts import CANDIDATES
from tests.conftest import ON_GPU

DEVICE = "cuda" if ON_GPU else "cpu"


def layer(inputs: int, outputs: int, dtype: torch.dtype = torch.bfloat16, *, bias: bool = True) -> SplitKLinear:
    generator = torch.Generator().manual_seed(0)
    plain = torch.nn.Linear(inputs, outputs, bias).requires_grad_(False)
    for weights in plain.parameters():
        weights.copy_(torch.randn(weights.shape, generator=generator))
    found = split_k(plain.to(DEVICE, dtype))
    assert found is not None
    return found


def rows_of(count: int, inputs: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("inputs", "outputs", "rows"),
    [(1100, 70, 3), (2048, 64, 17), (96, 40, 130), (1024, 200, 1)],
    ids=["two uneven parts", "even parts", "one part, many rows", "one row"],
)
@pytest.mark.parametrize("bias", [True, False])
def test_it_is_the_product_rounded_once(inputs: int, outputs: int, rows: int, bias: bool, dtype: torch.dtype) -> None:
    own, x = layer(inputs, outputs, dtype, bias=bias), rows_of(rows, inputs, dtype)
    want = x.double() @ own.weight.double().T + (own.bias.double() if bias else 0.0)
    with torch.inference_mode():
        got = own(x)
    assert got.dtype == dtype
    rounding = torch.finfo(dtype).eps / (2 if ON_GPU else 1)  # the interpreter truncates to bfloat16
    error = rounding * want.abs() + 1e-5 * float(want.abs().max())
    assert ((got.double() - want).abs() <= error).all()


def test_parts_added_in_memory_and_at_once_are_the_same_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """For many rows one program adds all parts; for few, several programs write partial sums for another to add."""
    own, x = layer(2048, 100), rows_of(130, 2048)
    assert parts_of(2048, 100) == 4
    with torch.inference_mode():
        apart = own(x)
        monkeypatch.setattr(gpu_linear, "WHOLE", 1)
        whole = own(x)
    if ON_GPU:
        assert torch.equal(apart, whole)
    else:  # the interpreter multiplies with numpy, in the same order; numpy does not promise the same bits
        torch.testing.assert_close(apart, whole)


def test_shapes_are_kept_and_views_are_read() -> None:
    own, x = layer(64, 32), rows_of(6, 128)
    with torch.inference_mode():
        got = own(x[:, :64].view(2, 3, 64))
        assert got.shape == (2, 3, 32)
        assert torch.equal(got.view(6, 32), own(x[:, :64].contiguous()))
        assert torch.equal(own(rows_of(64, 6).T), own(rows_of(64, 6).T.contiguous()))


def test_what_has_no_counterpart() -> None:
    assert split_k(torch.nn.Linear(8, 8)) is None  # float32
    assert split_k(torch.nn.Linear(8, 8).to(torch.float64)) is None
    assert split_k(layer(8, 8)) is None  # already replaced


@pytest.mark.parametrize(("inputs", "outputs"), [(4096, 4096), (14336, 4096), (128256, 64), (64, 128256), (8, 8)])
def test_parts_are_few_and_long(inputs: int, outputs: int) -> None:
    parts = parts_of(inputs, outputs)
    assert parts == 1 or inputs // parts >= 512
    assert parts * outputs <= 256 * 64 or parts == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), [(4096, 4096), (8192, 2048), (1000, 200), (2048, 12000)])
def test_a_row_has_the_same_bits_among_any_number(inputs: int, outputs: int, dtype: torch.dtype) -> None:
    own, x = layer(inputs, outputs, dtype), rows_of(1500, inputs, dtype)
    with torch.inference_mode():
        whole = own(x)
        for count in (*CANDIDATES, 1000):
            assert torch.equal(own(x[1500 - count :]), whole[1500 - count :]), count
