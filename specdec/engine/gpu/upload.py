"""Copying arrays to a GPU without waiting for it."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return the array as a tensor on the device; on a CPU it shares the array's memory.

    From pageable memory the GPU driver copies only after all earlier work, and blocks the host. So the copy goes
    through pinned memory, from torch's pool, which tracks the end of each copy.
    """
    here = torch.from_numpy(array)
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here
