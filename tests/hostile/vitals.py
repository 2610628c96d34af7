"""Health of a cluster's pods: alive, idle without callers, no larger than before, and without a traceback in their
logs."""

from __future__ import annotations

import asyncio
import contextlib
import re
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec.v2 import draft_pb2, draft_pb2_grpc, verifier_pb2, verifier_pb2_grpc
from tests.faults.cluster import Cluster
from tests.faults.pods import Pod

REST_SECONDS = 20.0
"""Seconds until sessions of departed callers are gone."""

BUG = re.compile(rb"Traceback|exc_info|\"exception\"|Segmentation|terminate called")
"""Log output that only a bug produces."""

SERVICES = {
    "verifier": "specdec.v2.VerifierService",
    "draft": "specdec.v2.DraftService",
    "orchestrator": "specdec.v2.GenerationService",
}
"""The service of each role."""

KEPT = 5
"""Bugs quoted per log, each with the lines that follow."""

FOLLOWING = 12
MAX_QUOTED_CHARACTERS = 1500


def memory(cluster: Cluster) -> dict[str, float]:
    """Return the private memory of each pod in MiB."""
    return {name: resident_mib(pod.pid) for name, pod in cluster.pods.items()}


def resident_mib(pid: int | str = "self") -> float:
    """Return a process's private resident memory in MiB, without file mappings, which the kernel evicts and reloads at
    will."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def log_bytes(cluster: Cluster) -> dict[str, int]:
    return {name: pod.log.stat().st_size for name, pod in cluster.pods.items()}


def bugs(cluster: Cluster) -> list[str]:
    """Return the first bugs of each log with the lines that follow them, and their number."""
    found = []
    for name, pod in cluster.pods.items():
        lines = pod.log.read_bytes().splitlines()
        places = [place for place, line in enumerate(lines) if BUG.search(line)]
        for place in places[:KEPT]:
            told = b"\n".join(lines[place : place + FOLLOWING]).decode(errors="replace")
            found.append(f"{name}: {told[:MAX_QUOTED_CHARACTERS]}")
        found += [f"{name}: {len(places)} in all"] * bool(places)
    return found


async def at_rest(cluster: Cluster) -> None:
    """Wait until no verifier or draft has a session; TimeoutError if one keeps some."""
    for role, sessions in (("verifier", _verifier_sessions), ("draft", _draft_sessions)):
        for pod in cluster.of(role):
            async with asyncio.timeout(REST_SECONDS):
                while await sessions(cluster, pod):
                    await asyncio.sleep(0.05)


async def serving(cluster: Cluster, health: Sequence[str] = (), metrics: Sequence[str] = ()) -> list[str]:
    """Return the pods and health ports that are not SERVING, and the metrics ports without a correct answer."""
    found = []
    for address in health:
        async with grpc.aio.insecure_channel(address) as channel:
            checks: Any = health_pb2_grpc.HealthStub(channel)
            answer = await checks.Check(health_pb2.HealthCheckRequest(), timeout=5.0)
        found += [f"health at {address}"] * (answer.status != health_pb2.HealthCheckResponse.SERVING)
    for address in metrics:
        with contextlib.suppress(OSError):
            if b"specdec_" in await asyncio.to_thread(_scraped, address):
                continue
        found.append(f"metrics at {address}")
    for role, service in SERVICES.items():
        for pod in cluster.of(role):
            async with cluster.channel(pod) as channel:
                stub: Any = health_pb2_grpc.HealthStub(channel)
                answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5.0)
            if answer.status != health_pb2.HealthCheckResponse.SERVING:
                found.append(pod.name)
    return found


def _scraped(address: str) -> bytes:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=20) as answer:
        return bytes(answer.read())


async def _verifier_sessions(cluster: Cluster, pod: Pod) -> int:
    async with cluster.channel(pod) as channel:
        stub: Any = verifier_pb2_grpc.VerifierServiceStub(channel)
        load = await stub.GetStats(verifier_pb2.GetStatsRequest(), timeout=5.0)
    return int(load.running + load.waiting)


async def _draft_sessions(cluster: Cluster, pod: Pod) -> int:
    async with cluster.channel(pod) as channel:
        stub: Any = draft_pb2_grpc.DraftServiceStub(channel)
        stats = await stub.GetStats(draft_pb2.DraftServiceGetStatsRequest(), timeout=5.0)
    return int(stats.sessions)
