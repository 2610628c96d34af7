"""What is attacked: two verifiers, a draft and an orchestrator, each a process with a log."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.faults.cluster import Cluster, Models
from tests.hostile.attacks import ROLES
from tests.hostile.fuzz import Fuzzer


@asynccontextmanager
async def deployed(models: Models, logs: Path) -> AsyncIterator[Cluster]:
    """All of them ready."""
    cluster = Cluster(models, logs).deploy(verifiers=2, drafts=1, orchestrators=1)
    with cluster:
        await cluster.make_whole()
        yield cluster


def fuzzer_of(cluster: Cluster, seed: int) -> Fuzzer:
    """One that attacks every pod."""
    return Fuzzer({role: [pod.address for pod in cluster.of(role)] for role in ROLES}, seed)
