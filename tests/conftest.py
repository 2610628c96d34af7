"""What holds for all tests."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

ON_GPU = torch.cuda.is_available()
if not ON_GPU:  # kernels for GPUs are run by an interpreter; read when triton is first imported
    os.environ["TRITON_INTERPRET"] = "1"

# Tests and the services that they start keep compiled loops in the checkout, not in the user's cache folder.
os.environ.setdefault("SPECDEC_CACHE_DIR", str(Path(__file__).parents[1] / "build" / "cache"))

# How long an example takes says how busy the machine is, and nothing else.
settings.register_profile(
    "specdec",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=True,  # the same examples for everyone; `pytest --hypothesis-profile explore` looks for others
)
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("specdec")


def pytest_collection_finish() -> None:
    """Exempt what is loaded from garbage collection, as services do at their start. Many tests have services in their
    own process; to scan all tests and their modules would stop these for half a second each time."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu` where there is none."""
    if not ON_GPU:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="there is no GPU"))
