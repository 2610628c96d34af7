"""CUDA graphs: what a forward pass asks of a GPU, recorded once for each size of batch and asked again in one call.

Of a step of an 8B model over a few rows, asking for some three hundred kernels one by one takes the host longer than
running them takes the device.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.engine.gpu.layout import SplitKvBatch
from specdec.engine.gpu.staging import SplitKvTensors

MOST_ROWS = 128
"""Of a batch that is worth recording: the kernels of larger ones take longer than asking for them."""

MOST_GRAPHS = 96
"""Kept at once; the least recently used go first. Each holds its logits."""

Pass = Callable[[SplitKvTensors], Tensor]
"""A forward pass without a word from the host in between: logits [wanted, vocabulary]."""


@dataclass(frozen=True)
class _Recorded:
    graph: torch.cuda.CUDAGraph
    batch: SplitKvTensors
    logits: Tensor


class Graphs:
    """Of one pass, recorded when a size first comes up."""

    def __init__(self, run: Pass, device: torch.device) -> None:
        self._run = run
        self._device = device
        self._recorded: OrderedDict[tuple[int, int], _Recorded] = OrderedDict()
        self._pool = torch.cuda.graph_pool_handle()
        self._beside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def forward(self, batch: SplitKvBatch) -> Tensor:
        """Logits of all rows, until the next call."""
        size = len(batch.tokens), len(batch.tile_counts)
        recorded = self._recorded.get(size)
        if recorded is None:
            recorded = self._recorded[size] = self._record(batch)
            if len(self._recorded) > MOST_GRAPHS:
                self._recorded.popitem(last=False)
        self._recorded.move_to_end(size)
        recorded.batch.fill(batch)
        recorded.graph.replay()
        return recorded.logits

    def _record(self, batch: SplitKvBatch) -> _Recorded:
        """On a stream beside the current one, which is not to be recorded on."""
        tensors = SplitKvTensors.of(batch, self._device)
        self._beside.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._beside):
            self._run(tensors)  # compiles kernels, and makes what libraries make on first use of a stream
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._beside):  # waits for all that was asked before
            logits = self._run(tensors)
        return _Recorded(graph, tensors, logits)
