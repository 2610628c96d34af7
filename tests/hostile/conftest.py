"""Models of the attacked pods: a target, and a draft that often agrees with it."""

from __future__ import annotations

import pytest
import torch

from tests.faults.cluster import Models
from tests.models import make, near


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("models")
    target = make("llama", root / "target")
    return Models(target=target, draft=near(target, root / "draft", noise=0.04), revision=target)
