"""Models for the pods, and clients with long timeouts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specdec.client import AsyncClient
from tests.faults.asks import CONTEXT
from tests.faults.cluster import Cluster, Models
from tests.margins import Oracle
from tests.models import make, near
from tests.vllm.pod import needs_vllm


@pytest.fixture(scope="session", params=["ours", pytest.param("vllm", marks=[pytest.mark.verify, needs_vllm])])
def models(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Models:
    """Our CPU engine or vLLM runs the targets; with either, the tokens are the same whatever happens to pods."""
    return made(tmp_path_factory.mktemp("models"), on_vllm=request.param == "vllm")


def made(root: Path, *, on_vllm: bool = False) -> Models:
    torch.set_num_threads(1)
    sizes = {"max_position_embeddings": CONTEXT}
    if on_vllm:
        sizes["head_dim"] = 32  # the narrowest heads supported by vLLM on CPUs
    target = make("llama", root / "target", **sizes)
    return Models(
        target=target,
        draft=near(target, root / "draft", noise=0.04),
        revision=make("llama", root / "revision", seed=1, **sizes),
        on_vllm=on_vllm,
    )


@pytest.fixture(scope="session")
def oracle(models: Models) -> Oracle:
    return Oracle(models.target)


def client_of(cluster: Cluster, address: str = "") -> AsyncClient:
    """Return a client of one orchestrator, or of all. It waits for minutes if necessary: the machine may be slow."""
    own = {} if cluster.security is None else cluster.security.client_options
    return AsyncClient(address or cluster.address, timeout=400.0, max_retries=12, **own)
