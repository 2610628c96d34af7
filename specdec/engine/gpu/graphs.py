"""CUDA graphs: a forward pass captured once for each batch size, and replayed in one call.

In a step of an 8B model over a few rows, the host takes longer to launch about three hundred kernels one by one than
the GPU takes to run them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.engine.gpu.layout import SplitKvBatch
from specdec.engine.gpu.staging import SplitKvTensors

MAX_ROWS = 512
"""Rows of the largest batch to capture. Larger batches, mostly prompts, have too many different sizes."""

MAX_GRAPHS = 256
"""Maximum number of graphs; the least recently used is dropped first. Each holds its batch, its result, and the
driver's data for its kernels."""

Pass = Callable[[SplitKvTensors], Tensor]
"""A forward pass without synchronisation between host and GPU; returns a tensor [rows, ...]."""


@dataclass(frozen=True)
class _Recorded:
    graph: torch.cuda.CUDAGraph
    batch: SplitKvTensors
    result: Tensor


class Graphs:
    """The CUDA graphs of a forward pass, each captured at the first batch of its size."""

    def __init__(self, run: Pass, device: torch.device) -> None:
        self._run = run
        self._device = device
        self._recorded: OrderedDict[tuple[int, int], _Recorded] = OrderedDict()
        self._pool = torch.cuda.graph_pool_handle()
        self._beside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def forward(self, batch: SplitKvBatch) -> tuple[SplitKvTensors, Tensor]:
        """Replay the pass, after capturing it for a new size; return the batch on the GPU and the result, both valid
        until the next call. Batches with equal numbers of rows and tiles must have equal numbers of wanted rows."""
        key = len(batch.tokens), len(batch.tile_counts)
        recorded = self._recorded.get(key)
        if recorded is None:
            recorded = self._recorded[key] = self._record(batch)
            if len(self._recorded) > MAX_GRAPHS:
                self._recorded.popitem(last=False)
        self._recorded.move_to_end(key)
        recorded.batch.fill(batch)
        recorded.graph.replay()
        return recorded.batch, recorded.result

    def _record(self, batch: SplitKvBatch) -> _Recorded:
        """Capture the pass on a separate stream: the current one cannot be captured."""
        tensors = SplitKvTensors.of(batch, self._device)
        self._beside.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._beside):
            self._run(tensors)  # compiles kernels and initialises libraries on the new stream
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._beside):  # waits for all earlier work
            result = self._run(tensors)
        return _Recorded(graph, tensors, result)
