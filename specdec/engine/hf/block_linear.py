"""Linear layers with weights quantised in blocks of 32 numbers, to 4 or 8 bits, on a CPU.

ONNX Runtime's kernel (MatMulNBits) multiplies them: it rounds activations to 8 bits, with one scale per 32 numbers, and
sums in integers. A decode step reads a fraction of the bytes, so steps over few rows are faster; steps over many are
not. A row's sum does not depend on the rest of the batch, as the check at start verifies.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from specdec.engine.hf.linear import is_plain, lay_out
from specdec.engine.placement import BLOCK
from specdec.engine.unsupported import UnsupportedModelError

CONTRIB = "com.microsoft"  # the domain of ONNX Runtime's own operators
INT8_ACTIVATIONS = 4
"""Accuracy level of MatMulNBits: on CPUs, activations are rounded to 8 bits, and products computed in integers. GPUs
have no levels."""

ELEMENTS = {torch.float32: 1, torch.bfloat16: 16}
"""Tensor dtype -> ONNX's number for it (`TensorProto`). onnx and ONNX Runtime are imported only where they are used,
because verifiers that quantise no weights run without them."""

PIECE_COLUMNS = 8192
"""Columns of a weight quantised at a time."""


class BlockLinear(torch.nn.Module):
    """A linear layer with its weight in blocks; inputs and outputs have the original weight's dtype, float32 or
    bfloat16."""

    def __init__(self, linear: torch.nn.Linear, bits: int, threads: int) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.dtype = linear.weight.dtype
        self.bias = linear.bias
        self._element = ELEMENTS[self.dtype]
        from specdec.engine.onnx_runtime import ort

        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.enable_cpu_mem_arena = options.enable_mem_pattern = False  # one of each per layer would take a gigabyte
        options.log_severity_level = 3
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # as in `onnx/engine.py`
        graph = _graph(linear, bits, self._element).SerializeToString()
        self._session = ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        self._binding = self._session.io_binding()

    def forward(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        rows = x.numel() // self.in_features
        result = torch.empty(*x.shape[:-1], self.out_features, dtype=self.dtype)
        if not rows:  # an output head without wanted rows: an empty tensor has no memory to bind
            return result
        bound: Any = self._binding
        bound.bind_input("x", "cpu", 0, self._element, (rows, self.in_features), x.data_ptr())
        bound.bind_output("y", "cpu", 0, self._element, (rows, self.out_features), result.data_ptr())
        self._session.run_with_iobinding(bound)
        return result


def _graph(linear: torch.nn.Linear, bits: int, element: int) -> Any:
    """Return the graph of y [t, n] = x [t, k] W^T + b: x and y of this element type, cast around a float32 product."""
    from onnx import helper, numpy_helper

    arrays = in_blocks(linear.weight.detach().float().numpy().T, bits)
    attributes = {"K": linear.in_features, "N": linear.out_features, "bits": bits, "block_size": BLOCK}
    inputs = ["wide", *arrays]
    if linear.bias is not None:
        arrays["bias"] = linear.bias.detach().float().numpy()
        inputs += ["", "bias"]
    return helper.make_model(
        helper.make_graph(
            [
                helper.make_node("Cast", ["x"], ["wide"], to=ELEMENTS[torch.float32]),
                helper.make_node(
                    "MatMulNBits", inputs, ["product"], domain=CONTRIB, accuracy_level=INT8_ACTIVATIONS, **attributes
                ),
                helper.make_node("Cast", ["product"], ["y"], to=element),
            ],
            "linear",
            [helper.make_tensor_value_info("x", element, ["rows", linear.in_features])],
            [helper.make_tensor_value_info("y", element, ["rows", linear.out_features])],
            [numpy_helper.from_array(array, name) for name, array in arrays.items()],
        ),
        opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid(CONTRIB, 1)],
        ir_version=10,
    )


def in_blocks(weight: NDArray[Any], bits: int) -> dict[str, NDArray[Any]]:
    """Quantise a weight [k, n] in blocks along k. Return the inputs of MatMulNBits after the activations, in order:
    blocks, scales and zero points. ONNX Runtime's own code computes them; it gets only some columns at a time, because
    it makes several copies of them."""
    from specdec.engine.onnx_runtime import block_quantizer

    quantizer = block_quantizer(BLOCK, bits)
    columns = weight.shape[1]
    pieces = (weight[:, begin : begin + PIECE_COLUMNS] for begin in range(0, columns, PIECE_COLUMNS))
    found = [quantizer.qbits_block_quant(np.ascontiguousarray(piece)) for piece in pieces]
    blocks, scales, zeros = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return {"blocks": blocks, "scales": scales.reshape(-1), "zeros": zeros.reshape(-1)}


def check_threads(model: torch.nn.Module, merged: int, threads: int, left: int | None) -> None:
    """Raise UnsupportedModelError if `quantise` would start more threads than are `left` (None: any number). `merged`:
    number by which joining reduces the model's products."""
    products = sum(is_plain(module) or isinstance(module, Conv1D) for module in model.modules()) - merged
    needed = products * (threads - 1)
    if left is not None and needed > left:
        raise UnsupportedModelError(
            f"quantised weights: {products} products with {threads} threads each need {needed} more threads, "
            f"pids.max permits {left}: use fewer --threads"
        )


def quantise(model: torch.nn.Module, bits: int, threads: int, dtype: torch.dtype) -> None:
    """Replace every linear layer in a module by a BlockLinear that computes in `dtype`. Each weight is freed before the
    next one is converted and quantised."""
    lay_out(model, lambda layer: BlockLinear(layer.to(dtype), bits, threads))
