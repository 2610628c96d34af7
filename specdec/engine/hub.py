"""Disables the hub of models and kernels: a model consists of the files in its directory."""

from __future__ import annotations

import os


def disable() -> None:
    """Prevent transformers from loading code (attention, layers, kernels of quantised weights) from a hub, even if a
    model's configuration requests it. Call it before importing transformers, which reads these variables only once."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["USE_HUB_KERNELS"] = "NO"
