"""Copying arrays to a GPU without waiting for it."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return the array as a tensor on the device; on a CPU it shares the array's memory.

    From pageable memory a GPU's driver copies only after all earlier work, and the host waits; so the numbers go
    through pinned memory, of which torch keeps a store and knows when a copy is over.
    """
    here = torch.from_numpy(array)
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here
