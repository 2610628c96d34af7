"""The target of attacks: two verifiers, a draft and an orchestrator, each a process with a log and three ports."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.cluster import Cluster, Models
from tests.faults.pods import free_address
from tests.faults.security import Security
from tests.hostile.access import Access, SecuredAccess
from tests.hostile.conversations import ENCRYPTED_ROLES
from tests.hostile.fuzz import Fuzzer


@dataclass
class Deployment:
    """A cluster, and its ports for health checks and metrics."""

    cluster: Cluster
    health: list[str] = field(default_factory=list)
    metrics: list[str] = field(default_factory=list)

    def ports(self) -> tuple[str, ...]:
        """Return the port options of one more pod."""
        options: list[str] = []
        for kind, addresses in (("--health-port", self.health), ("--metrics-port", self.metrics)):
            addresses.append(free_address())
            options += [kind, addresses[-1].rpartition(":")[2]]
        return tuple(options)

    def fuzzer(self, seed: int) -> Fuzzer:
        security = self.cluster.security
        addresses = {role: [pod.address for pod in self.cluster.of(role)] for role in ENCRYPTED_ROLES}
        addresses |= {"health": self.health, "metrics": self.metrics}
        return Fuzzer(addresses, seed, Access() if security is None else SecuredAccess(security))


@asynccontextmanager
async def deployed(models: Models, logs: Path, security: Security | None = None) -> AsyncIterator[Deployment]:
    """Start all pods, and wait until they are ready."""
    cluster = Cluster(models, logs, security)
    deployment = Deployment(cluster)
    verifiers = [cluster.verifier(*deployment.ports()).address for _ in range(2)]
    draft = cluster.draft(*deployment.ports()).address
    cluster.orchestrator(verifiers, [draft], *deployment.ports())
    with cluster:
        await cluster.make_whole()
        yield deployment
