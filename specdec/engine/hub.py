"""The hub of models and kernels, which is never used: a model consists of the files in its directory."""

from __future__ import annotations

import os


def disable_hub() -> None:
    """Prevent transformers from loading code from a hub, even if a model's configuration requests it: attention,
    layers, or the kernels of quantised weights. Must be called before importing transformers, which reads these
    variables only once."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["USE_HUB_KERNELS"] = "NO"
