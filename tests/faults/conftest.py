"""Models for the pods, and clients that are patient."""

from __future__ import annotations

import pytest
import torch

from specdec.client import AsyncClient
from tests.faults.asks import CONTEXT
from tests.faults.cluster import Cluster, Models
from tests.margins import Oracle
from tests.models import make, near


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("models")
    target = make("llama", root / "target", max_position_embeddings=CONTEXT)
    return Models(
        target=target,
        draft=near(target, root / "draft", noise=0.04),
        revision=make("llama", root / "revision", seed=1, max_position_embeddings=CONTEXT),
    )


@pytest.fixture(scope="session")
def oracle(models: Models) -> Oracle:
    return Oracle(models.target)


def client_of(cluster: Cluster, address: str = "") -> AsyncClient:
    """A client of all orchestrators, or of one. It waits for minutes where it must: the machine may be slow."""
    own = {} if cluster.security is None else cluster.security.client_options
    return AsyncClient(address or cluster.address, timeout=120.0, max_retries=12, **own)
