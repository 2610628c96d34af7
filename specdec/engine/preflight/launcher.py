"""Checks that no launcher has started this process as a part of a model."""

from __future__ import annotations

import os

from specdec.engine.unsupported import UnsupportedModelError

SIZE = "WORLD_SIZE"
"""Environment variable in which torchrun tells each process their number."""


def check_launcher() -> None:
    """Raise UnsupportedModelError under a launcher of several processes: each would load and serve the whole model."""
    if (size := os.environ.get(SIZE, "1")) != "1":
        raise UnsupportedModelError(
            f"{SIZE} is {size}, as set by torchrun, but a verifier is one process: leave out torchrun, and for several "
            "GPUs use --engine vllm --vllm-options '{\"tensor_parallel_size\": N}'"
        )
