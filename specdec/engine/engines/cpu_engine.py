"""The torch engine on CPU threads, whose number can be changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from specdec.engine.engines.torch_engine import TorchEngine
from specdec.engine.model_directory import ModelDirectory


class CpuEngine(TorchEngine):
    """A torch engine on the CPU that computes with each of `threads`, thread counts with the largest first; with as
    many as torch has now, if there are none."""

    def __init__(self, directory: ModelDirectory, *, threads: Sequence[int] = (), **options: Any) -> None:
        self.threads = tuple(dict.fromkeys(threads)) or (torch.get_num_threads(),)
        torch.set_num_threads(self.threads[0])
        super().__init__(directory, **options)

    def use_threads(self, count: int) -> None:
        torch.set_num_threads(count)
        if self._memory is not None:
            self._memory.threads = count
