"""The weights of an exported graph: unchanged, or quantised in blocks of BLOCK numbers.

The exporter leaves the product of a linear layer with the weight W [n, k] as `MatMul(x, Transpose(W))`. An unquantised
weight is transposed only while it is written, so that an export holds no second copy of the weights. A quantised
product becomes ONNX Runtime's `MatMulNBits`, with 4 or 8 bits per number, and a scale and a zero point per block. With
quantised products, the table of token embeddings has 8 bits, as `GatherBlockQuantized`: it is read, not multiplied, so
fewer bits would save memory but no time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnxscript.rewriter import RewriteRuleClassBase, rewrite

from specdec.engine.hf.block_linear import CONTRIB, INT8_ACTIVATIONS, in_blocks
from specdec.engine.placement import BLOCK, TABLE_BITS

Bits = Literal[4, 8, 32]
"""Bits of a weight; 32 means the dtype of the export, even if that is float16."""

TABLE_ZERO = 1 << (TABLE_BITS - 1)
PIECE_ROWS = 8192
"""Rows of a table quantised at a time."""

Array = NDArray[Any]
Progress = Callable[[int, int], None]
"""Called with the bytes of weights quantised so far, and the total."""


def lay_out(model: ir.Model, bits: Bits, vocabulary: int, progress: Progress) -> None:
    """Lay out the weights of a traced graph, in place. Products whose operands are not weights stay unchanged."""
    if bits == 32:
        rules = [_Transposed.rule()]
    else:
        products = (_Product, _ProductOfTransposed, _ProductWithBias)
        total = size_of(model)
        quantise = _Quantise(bits, lambda done: progress(done, total))
        rules = [*(rule.rule(quantise) for rule in products), _Table.rule(vocabulary)]
        model.opset_imports[CONTRIB] = 1
    rewrite(model, pattern_rewrite_rules=rules)


def size_of(model: ir.Model) -> int:
    """Return the bytes of a graph's weights in their current form."""
    return sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value is not None)


def _is_weight(value: ir.Value) -> bool:
    tensor = value.const_value
    return value.is_initializer() and tensor is not None and len(tensor.shape) == 2


def _numbers(value: ir.Value) -> Array:
    assert value.const_value is not None  # as checked before
    found: Array = value.const_value.numpy()
    return found


class _Transposed(RewriteRuleClassBase):  # type: ignore[misc]
    """A transposed weight becomes a tensor computed when it is written."""

    def pattern(self, op: Any, weight: Any) -> Any:
        return op.Transpose(weight, perm=[1, 0])

    def check(self, _: Any, weight: ir.Value) -> bool:
        return _is_weight(weight)

    def rewrite(self, op: Any, weight: ir.Value) -> Any:
        tensor, name = weight.const_value, f"{weight.name}.transposed"
        assert tensor is not None  # as checked
        rows, columns = tensor.shape

        def transposed() -> ir.TensorProtocol:
            return ir.tensor(np.ascontiguousarray(tensor.numpy().T), name=name)

        return op.initializer(ir.LazyTensor(transposed, tensor.dtype, ir.Shape([columns, rows]), name=name))


class _Quantise:
    """Makes the MatMulNBits operator for a product."""

    def __init__(self, bits: int, progress: Callable[[int], None]) -> None:
        self._bits, self._progress, self._done = bits, progress, 0

    def __call__(self, op: Any, x: ir.Value, name: str | None, weight: Array) -> Any:
        """Return the product with a weight [k, n]."""
        arrays = in_blocks(weight, self._bits)
        self._done += weight.nbytes
        self._progress(self._done)
        level = {"accuracy_level": INT8_ACTIVATIONS} if weight.dtype == np.float32 else {}
        return op.MatMulNBits(
            x,
            *(op.initializer(ir.tensor(array, name=f"{name}.{kind}")) for kind, array in arrays.items()),
            K=weight.shape[0],
            N=weight.shape[1],
            bits=self._bits,
            block_size=BLOCK,
            **level,
            _domain=CONTRIB,
        )


class _Quantising(RewriteRuleClassBase):  # type: ignore[misc]
    def __init__(self, quantise: _Quantise) -> None:
        super().__init__()
        self._quantise = quantise


class _Product(_Quantising):
    """A product with a weight [k, n]."""

    def pattern(self, op: Any, x: Any, weight: Any) -> Any:
        return op.MatMul(x, weight)

    def check(self, _: Any, weight: ir.Value, **__: Any) -> bool:
        return _is_weight(weight)

    def rewrite(self, op: Any, x: ir.Value, weight: ir.Value) -> Any:
        return self._quantise(op, x, weight.name, _numbers(weight))


class _ProductOfTransposed(_Product):
    """A product with a weight [n, k]."""

    def pattern(self, op: Any, x: Any, weight: Any) -> Any:
        return op.MatMul(x, op.Transpose(weight, perm=[1, 0]))

    def rewrite(self, op: Any, x: ir.Value, weight: ir.Value) -> Any:
        return self._quantise(op, x, weight.name, _numbers(weight).T)


class _ProductWithBias(_Quantising):
    """A product and a sum in one operator, as in GPT-2's layers."""

    def pattern(self, op: Any, x: Any, weight: Any, bias: Any) -> Any:
        return op.Gemm(x, weight, bias, _allow_other_attributes=True, _outputs=["gemm"])

    def check(self, _: Any, weight: ir.Value, gemm: ir.Value, **__: Any) -> bool:
        node = gemm.producer()
        assert node is not None  # the one that matched
        numbers = {name: attribute.value for name, attribute in node.attributes.items()}
        plain = numbers.get("alpha", 1) == numbers.get("beta", 1) == 1 and not numbers.get("transA", 0)
        return plain and _is_weight(weight)

    def rewrite(self, op: Any, x: ir.Value, weight: ir.Value, bias: ir.Value, gemm: ir.Value) -> Any:
        node = gemm.producer()
        assert node is not None
        transposed = "transB" in node.attributes and node.attributes["transB"].value
        numbers = _numbers(weight).T if transposed else _numbers(weight)
        return op.Add(self._quantise(op, x, weight.name, numbers), bias)


class _Table(RewriteRuleClassBase):  # type: ignore[misc]
    """The lookup in the table of token embeddings [vocabulary, width] becomes a GatherBlockQuantized."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self._vocabulary = vocabulary

    def pattern(self, op: Any, table: Any, tokens: Any) -> Any:
        return op.Gather(table, tokens, _allow_other_attributes=True)

    def check(self, _: Any, table: ir.Value, **__: Any) -> bool:
        shape = table.const_value.shape if _is_weight(table) and table.const_value is not None else (0, 0)
        return shape[0] == self._vocabulary and shape[1] % BLOCK == 0

    def rewrite(self, op: Any, table: ir.Value, tokens: ir.Value) -> Any:
        numbers = _numbers(table)
        rows, width = numbers.shape
        blocks = np.empty((rows, width), np.uint8)
        scales = np.empty((rows, width // BLOCK), numbers.dtype)
        for begin in range(0, rows, PIECE_ROWS):
            place = slice(begin, begin + PIECE_ROWS)
            piece = numbers[place].astype(np.float32).reshape(-1, width // BLOCK, BLOCK)
            steps = np.abs(piece).max(axis=2, keepdims=True) / (TABLE_ZERO - 1)
            scales[place] = steps[:, :, 0]
            levels = np.rint(np.divide(piece, steps, out=np.zeros_like(piece), where=steps > 0))
            blocks[place] = (levels + TABLE_ZERO).astype(np.uint8).reshape(-1, width)
        return op.GatherBlockQuantized(
            op.initializer(ir.tensor(blocks, name=f"{table.name}.blocks")),
            tokens,
            op.initializer(ir.tensor(scales, name=f"{table.name}.scales")),
            op.initializer(ir.tensor(np.full(scales.shape, TABLE_ZERO, np.uint8), name=f"{table.name}.zeros")),
            bits=TABLE_BITS,
            block_size=BLOCK,
            gather_axis=0,
            quantize_axis=1,
            _domain=CONTRIB,
        )
