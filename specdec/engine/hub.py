"""The hub of models and kernels, from which nothing is taken: a model is what lies in its directory."""

from __future__ import annotations

import os


def stay_away() -> None:
    """Have transformers take no code from a hub, whatever a model's configuration asks for: neither attention nor
    layers nor the kernels of quantised weights. Called before transformers is imported, which reads this once."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["USE_HUB_KERNELS"] = "NO"
