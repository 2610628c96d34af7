"""From the host's memory to a device's, without waiting for it."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(array: NDArray[Any], device: torch.device) -> Tensor:
    """The array's numbers on the device; on a CPU in the array's own memory.

    From memory that may be paged out a GPU's driver copies when it has done what it was asked before; so the numbers
    go by pinned memory, of which torch keeps a store and knows when a copy has been made.
    """
    here = torch.from_numpy(array)
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here
