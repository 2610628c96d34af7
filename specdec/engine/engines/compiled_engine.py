"""A model compiled by torch: its layers fused into a few kernels, with our attention as one operator.

It saves about a quarter of a small model's step, but needs a C++ compiler and about a minute at start.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
import torch._inductor.config
from torch import Tensor

from specdec.engine.batch import PackedBatch
from specdec.engine.batch_independence import rows_are_independent
from specdec.engine.engine import UnsupportedModelError
from specdec.engine.engines.cpu_engine import CpuEngine
from specdec.engine.hf.attention_hook import PackedAttention
from specdec.engine.hf.linear import Float32Head, Head, lay_out
from specdec.engine.hf.reference_check import ReferenceCheck
from specdec.engine.row_counts import CANDIDATES, InvariantRowCounts
from specdec.engine.start_phases import phase

LEAST_ROWS = 2
"""Rows of the smallest batch: a single row would be compiled separately, with kernels that may round differently."""

_running: dict[int, PackedAttention] = {}
"""The attention of each pass in progress, by number of its `CompiledModel`: a custom operator takes no objects."""

_numbers = itertools.count()


@torch.library.custom_op("specdec::attend", mutates_args=())
def _attend(
    query: Tensor, key: Tensor, value: Tensor, number: int, layer: int, scale: float, softcap: float, window: int
) -> Tensor:
    return _running[number].attend(
        layer, query, key, value, scale=scale, softcap=softcap or None, window=window or None
    )


@_attend.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, number: int, layer: int, scale: float, softcap: float, window: int
) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[1], value.shape[2])


class _Operator:
    """The attention as seen by the compiler: the same object in every pass."""

    def __init__(self, number: int) -> None:
        self.number = number

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        softcap: float | None,
        window: int | None,
    ) -> Tensor:
        attended: Tensor = torch.ops.specdec.attend(
            query, key, value, self.number, layer, scale, softcap or 0.0, window or 0
        )
        return attended


class CompiledModel:
    """A compiled model: one graph for all row counts >= LEAST_ROWS."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._operator = _Operator(next(_numbers))
        self._compiled: Callable[..., Any] = torch.compile(model, dynamic=True)

    def __call__(self, tokens: Tensor, positions: Tensor, wanted: Tensor, packed: PackedAttention) -> Tensor:
        input_ids, position_ids = tokens[None], positions[None]
        for tensor, dimension in ((input_ids, 1), (position_ids, 1), (wanted, 0)):
            torch._dynamo.mark_dynamic(tensor, dimension)
        _running[self._operator.number] = packed
        try:
            logits: Tensor = self._compiled(
                input_ids=input_ids,
                position_ids=position_ids,
                logits_to_keep=wanted,
                use_cache=False,
                packed=self._operator,
            ).logits
        finally:
            del _running[self._operator.number]
        return logits[0]


def frozen() -> AbstractContextManager[None]:
    """Return a context for the compiling call, to be made outside inference mode. In it weights become constants, laid
    out for the CPU's kernels as in `hf/linear.py` without a compiler. (As an option of `torch.compile` the setting
    comes too late to take effect.)"""
    patch: AbstractContextManager[None] = torch._inductor.config.patch(freezing=True)
    return patch


class CompiledEngine(CpuEngine):
    """An engine on the CPU with compiled layers, the model's own."""

    _compiled: CompiledModel | None = None
    float32_head: Head = Float32Head  # one product: the compiler makes a kernel of each

    forward_hidden = None  # type: ignore[assignment]  # so that it is no `HiddenStates`: the head is compiled with the layers

    def logits(self, batch: PackedBatch) -> Tensor:
        # In inference mode torch's compiler does not freeze the weights, and is then slower than no compiler.
        with torch.no_grad():
            return self._pass(batch)

    def _lay_out(self, dtype: torch.dtype) -> None:
        self._joined = self._packed = False
        lay_out(self.model, packed=False)

    def _settle(self, reference: ReferenceCheck, *, exact: bool) -> None:
        with phase("compiled_loops"):
            reference.check(self)
            self._compile()
        with phase("exactness"):
            self.exact = exact and rows_are_independent(self)  # compiled layers cannot be tiled

    def _compile(self) -> None:
        self._rows = InvariantRowCounts(tuple(count for count in CANDIDATES if count >= LEAST_ROWS))
        self._compiled = CompiledModel(self.model)
        packer = self.packer()
        rows = packer.add_rows([0, 0, 0], 0, [1, 2, 3])
        packer.add_path(np.arange(1, 4), rows)
        packer.want(rows[-1])
        try:
            with frozen():
                self.forward(packer.pack())
        except Exception as error:  # the compiler's errors have no common base
            reason = str(error).strip().partition("\n")[0]
            name = type(self.model).__name__
            raise UnsupportedModelError(f"{name} cannot be compiled: {type(error).__name__}: {reason}") from error

    def _execution(self) -> tuple[str, ...]:
        threads, *_ = super()._execution()
        return threads, "compiled", "layers"

    def _run(self, tokens: Tensor, positions: Tensor, wanted: Tensor, packed: PackedAttention) -> Tensor:
        if self._compiled is None:
            return super()._run(tokens, positions, wanted, packed)
        return self._compiled(tokens, positions, wanted, packed)
