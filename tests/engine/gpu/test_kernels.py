"""The kernels between a layer's products, compared with torch, and row by row in different batches."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the extra `cuda` is not installed")
from specdec.engine.gpu.kernels import GATE_BLOCK, add_and_normalise, gate, rotate, store

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ROUNDING = {torch.float32: 1e-5, torch.float16: 2**-11, torch.bfloat16: 2**-8 if DEVICE == "cuda" else 2**-7}
"""Relative rounding error of the type; Triton's interpreter truncates to bfloat16."""

EPSILON = 1e-6
HEADS, KV_HEADS = 3, 1


def random(*sizes: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def there(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
class TestLoops:
    def test_add_and_normalise(self, dtype: torch.dtype) -> None:
        residual, update, weight = (random(3, 48, seed=i, dtype=dtype) for i in range(3))
        weight, out = weight[0].clone(), torch.empty_like(residual)
        before, added = residual.clone(), residual + update
        add_and_normalise(residual, update, weight, EPSILON, out)
        torch.testing.assert_close(residual, added, rtol=ROUNDING[dtype], atol=0)
        want = torch.nn.functional.rms_norm(residual.float(), (48,), weight.float(), EPSILON)
        torch.testing.assert_close(out.float(), want, rtol=ROUNDING[dtype], atol=1e-6)
        alone = torch.empty_like(out[:1])
        add_and_normalise(before[1:2].clone(), update[1:2].clone(), weight, EPSILON, alone)
        assert torch.equal(alone[0], out[1])

    def test_gate(self, dtype: torch.dtype) -> None:
        inner = GATE_BLOCK + 40
        projected = 8 * random(2, 2 * inner, dtype=dtype)
        projected[0, :4] = torch.tensor([0.0, -200.0, 200.0, -1e-3])
        out = torch.empty(2, inner, dtype=dtype, device=DEVICE)
        gate(projected, out)
        gates, ups = projected.float().chunk(2, dim=1)
        torch.testing.assert_close(out.float(), torch.nn.functional.silu(gates) * ups, rtol=ROUNDING[dtype], atol=1e-6)
        alone = torch.empty_like(out[:1])
        gate(projected[1:].clone(), alone)
        assert torch.equal(alone[0], out[1])

    @pytest.mark.parametrize("width", [16, 24])
    @pytest.mark.parametrize("normalised", [False, True])
    def test_rotate(self, dtype: torch.dtype, width: int, normalised: bool) -> None:
        rows = 2
        projected = random(rows, (HEADS + 2 * KV_HEADS) * width, dtype=dtype)
        norms = random(2, width, seed=1, dtype=dtype) if normalised else None
        angles = random(50, width // 2, seed=2)
        positions, slots = there(7, 49), there(9, 4)
        query = torch.empty(rows, HEADS, width, dtype=dtype, device=DEVICE)
        keys, values = (torch.zeros(10, KV_HEADS, width, dtype=dtype, device=DEVICE) for _ in range(2))
        rotate(projected, norms, EPSILON, angles.cos(), angles.sin(), positions, slots, query, keys, values)

        split = projected.view(rows, -1, width)
        q, k, v = (part.float() for part in torch.split(split, [HEADS, KV_HEADS, KV_HEADS], dim=1))
        if norms is not None:
            q = torch.nn.functional.rms_norm(q, (width,), norms[0].float(), EPSILON)
            k = torch.nn.functional.rms_norm(k, (width,), norms[1].float(), EPSILON)
        angle = angles[positions.long()].repeat(1, 2)[:, None]

        def turned(x: Tensor) -> Tensor:
            low, high = x.chunk(2, dim=-1)
            return x * angle.cos() + torch.cat([-high, low], dim=-1) * angle.sin()

        torch.testing.assert_close(query.float(), turned(q), rtol=ROUNDING[dtype], atol=1e-5)
        torch.testing.assert_close(keys[slots.long()].float(), turned(k), rtol=ROUNDING[dtype], atol=1e-5)
        assert torch.equal(values[slots.long()].float(), v)
        untouched = [slot for slot in range(10) if slot not in slots.tolist()]
        assert not keys[untouched].any()
        assert not values[untouched].any()

    @pytest.mark.parametrize("broken", [math.nan, math.inf])
    def test_a_value_that_is_no_number_breaks_its_key(self, dtype: torch.dtype, broken: float) -> None:
        """The value itself becomes NaN too; the other heads stay unchanged."""
        key, value = random(2, 2, 5, dtype=dtype), random(2, 2, 3, seed=1, dtype=dtype)
        value[1, 0, 2] = broken
        keys, values = (torch.zeros(8, 2, width, dtype=dtype, device=DEVICE) for width in (5, 3))
        store(key, value, there(6, 2), keys, values)
        assert torch.equal(keys[6], key[0])
        assert torch.equal(values[6], value[0])
        assert torch.equal(keys[2, 1], key[1, 1])
        assert torch.equal(values[2, 1], value[1, 1])
        assert keys[2, 0].isnan().all()
        assert torch.equal(values[2, 0], torch.tensor([*value[1, 0, :2], 0.0], dtype=dtype, device=DEVICE))

        projected = torch.cat([random(1, HEADS * 4, dtype=dtype), key[:1, 0, :4], value[1:, 0, :1].repeat(1, 4)], dim=1)
        projected[0, -1] = broken
        keys, values = (torch.zeros(8, 1, 4, dtype=dtype, device=DEVICE) for _ in range(2))
        query = torch.empty(1, HEADS, 4, dtype=dtype, device=DEVICE)
        angles = torch.zeros(1, 2, device=DEVICE)
        rotate(projected, None, EPSILON, angles.cos(), angles.sin(), there(0), there(3), query, keys, values)
        assert torch.equal(query.flatten(), projected[0, : HEADS * 4])
        assert keys[3].isnan().all()
        assert torch.equal(values[3, 0], torch.tensor([*projected[0, -4:-1], 0.0], dtype=dtype, device=DEVICE))

    @pytest.mark.parametrize("broken", [math.nan, math.inf])
    @pytest.mark.parametrize("column", [5, 50], ids=["gate", "up"])
    @pytest.mark.filterwarnings("ignore::RuntimeWarning")  # from NumPy, which the interpreter uses
    def test_what_is_no_number_stays_none(self, dtype: torch.dtype, broken: float, column: int) -> None:
        """And the other rows are unaffected."""
        residual = random(2, 48, dtype=dtype)
        residual[1, 5] = broken
        out = torch.empty_like(residual)
        ones = torch.ones(48, dtype=dtype, device=DEVICE)
        add_and_normalise(residual, torch.zeros_like(residual), ones, EPSILON, out)
        assert not out[1].isfinite().all()
        assert out[0].isfinite().all()
        projected = random(2, 80, dtype=dtype)
        projected[1, column] = broken
        gated = torch.empty(2, 40, dtype=dtype, device=DEVICE)
        gate(projected, gated)
        assert not gated[1].isfinite().all()
        assert gated[0].isfinite().all()
