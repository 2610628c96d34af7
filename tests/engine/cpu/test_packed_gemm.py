"""Products called from compiled code equal torch's, bit by bit; their memory is kept as long as needed, then freed."""

from __future__ import annotations

import gc
import weakref
from resource import RUSAGE_SELF, getrusage
from typing import Any

import numpy as np
import pytest
import torch

from specdec.engine.cpu import packed_gemm
from specdec.engine.cpu.arithmetic import array_of
from specdec.engine.cpu.compiling import closed
from specdec.engine.cpu.packed_gemm import PackedGemm, References, TiledInputs, product
from specdec.engine.hf.linear import PackedLinear, can_pack


@closed("computed")
def computed(products: Any, number: Any) -> Any:
    return product(products, number)


pytestmark = pytest.mark.skipif(not packed_gemm.AVAILABLE, reason="this torch has not the function")

SHAPES = [(32, 48, True), (48, 24, False), (32, 48, False), (48, 24, True)]
"""Inputs, outputs and bias of four layers: two of each of two kinds."""


def linears(dtype: torch.dtype) -> list[PackedLinear]:
    if not can_pack(dtype):
        pytest.skip(f"no packed products of {dtype} here")
    torch.manual_seed(0)
    return [PackedLinear(torch.nn.Linear(i, o, bias).to(dtype).requires_grad_(False)) for i, o, bias in SHAPES]


def whole(inputs: list[torch.Tensor]) -> TiledInputs:
    return TiledInputs(inputs, [[len(each)] for each in inputs])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.inference_mode()
def test_the_bits_are_torchs(dtype: torch.dtype) -> None:
    layers = linears(dtype)
    products = PackedGemm(layers, 2)
    for rows in (1, 3, 40, 2):
        inputs = [torch.randn(rows, width).to(dtype) for width in (32, 48)]
        given = whole(inputs)
        asked = products.of(given, like=array_of(inputs[0]))
        for number in (0, 1, 2, 3, 3, 0):
            want = array_of(layers[number](inputs[number % 2]))
            np.testing.assert_array_equal(computed(asked, number), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.inference_mode()
def test_tiles_have_the_bits_of_tiles(dtype: torch.dtype) -> None:
    """Each kind of layer has its own tiles; some have a single tile."""
    layers = linears(dtype)
    products = PackedGemm(layers, 2)
    for tiles in ([[3, 2, 2], [7]], [[40], [32, 8]], [[1], [1]], [[4, 4], [1] * 8]):
        inputs = [torch.randn(sum(tiles[0]), width).to(dtype) for width in (32, 48)]
        given = TiledInputs(inputs, tiles)
        asked = products.of(given, like=array_of(inputs[0]))
        for number in (0, 1, 2, 3):
            parts = torch.split(inputs[number % 2], tiles[number % 2])
            want = np.concatenate([array_of(layers[number](part)) for part in parts])
            np.testing.assert_array_equal(computed(asked, number), want)


def test_what_does_not_fit_is_an_error_and_the_next_product_is_not() -> None:
    layers = linears(torch.float32)
    products = PackedGemm(layers, 2)
    wrong, right = ([torch.randn(2, width) for width in widths] for widths in ((31, 48), (32, 48)))
    kept = whole(wrong), whole(right)
    with pytest.raises(RuntimeError, match="product has failed"):
        computed(products.of(kept[0], like=wrong[0].numpy()), 0)
    got = computed(products.of(kept[1], like=right[0].numpy()), 0)
    np.testing.assert_array_equal(got, layers[0](right[0]).numpy())


def test_only_what_is_packed_and_alike_fits() -> None:
    layers = linears(torch.float32)
    assert PackedGemm.fitting(layers, 2) is not None
    assert PackedGemm.fitting([*layers[:3], torch.nn.Linear(48, 24)], 2) is None
    assert PackedGemm.fitting([*layers[:3], layers[0]], 2) is None


def test_results_are_given_back() -> None:
    """Of a gigabyte of results, with and without living owners, less than a tenth is allocated at any time."""
    wide = PackedLinear(torch.nn.Linear(8, 4096).requires_grad_(False))
    x = torch.randn(256, 8)
    given, lasting = whole([x]), PackedGemm([wide], 1)
    computed(lasting.of(given, like=x.numpy()), 0)
    before = getrusage(RUSAGE_SELF).ru_maxrss
    for _ in range(128):
        computed(lasting.of(given, like=x.numpy()), 0)
        leaving = PackedGemm([wide], 1)
        computed(leaving.of(given, like=x.numpy()), 0)
    assert getrusage(RUSAGE_SELF).ru_maxrss - before < 100_000  # kilobytes


def test_references_keep_tensors_and_give_them_back() -> None:
    array = np.ones(8, np.float32)
    gone = weakref.ref(array)
    references = References([torch.from_numpy(array)])
    del array
    gc.collect()
    assert gone() is not None
    del references
    gc.collect()
    assert gone() is None
