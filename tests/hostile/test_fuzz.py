"""No input stops the services: every port is called in every wrong way, and two well-behaved callers notice nothing.

A hundred thousand messages take some minutes: python -m pytest -s -m verify tests/hostile/test_fuzz.py
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from statistics import median

import pytest

from tests.faults.cluster import Cluster, Models
from tests.faults.security import Security
from tests.hostile import vitals
from tests.hostile.deployment import deployed
from tests.hostile.fuzz import Fuzzer
from tests.hostile.neighbour import Neighbour

SEED = 2026
ROUNDS = 10
"""After each round all pods come to rest, and memory is measured. The first two rounds warm up. The medians of the next
three and of the last three are compared, since a message of a megabyte shifts the heap for a while."""

FIRST, LAST = slice(2, 5), slice(-3, None)

MAX_LOG_BYTES = 20_000_000
"""Maximum log size of a pod, whatever its input."""

MAX_GROWTH_MIB = {"verifier": 32.0, "draft": 32.0, "orchestrator": 64.0}
"""Maximum growth of a pod after warm-up: enough for allocator fragmentation, too little for 400 bytes per message. An
orchestrator's tokenizing threads keep the memory of the longest text: with three times the messages it grows by a third
more."""


@pytest.mark.parametrize(
    ("messages", "secured"),
    [
        pytest.param(1_500, False, marks=pytest.mark.timeout(300)),
        pytest.param(100_000, False, marks=[pytest.mark.verify, pytest.mark.timeout(2400)]),
        pytest.param(30_000, True, marks=[pytest.mark.verify, pytest.mark.timeout(2400)]),
    ],
    ids=["few", "many", "secured"],
)
async def test_nothing_that_arrives_stops_them(models: Models, tmp_path: Path, messages: int, secured: bool) -> None:
    """Secured: each call uses mutual TLS, and clients and most attackers have API keys."""
    security = Security(tmp_path / "security") if secured else None
    async with deployed(models, tmp_path, security) as deployment:
        cluster, fuzzer = deployment.cluster, deployment.fuzzer(SEED)
        neighbour = Neighbour(cluster.address, **(security.client_options if security else {}))
        await neighbour.first()
        asking = asyncio.create_task(neighbour.ask_on())
        weights = [await weight_after(cluster, fuzzer, messages // ROUNDS) for _ in range(ROUNDS)]
        asking.cancel()
        await neighbour.ask()
        await neighbour.close()

        growth = {name: growth_of([each[name] for each in weights]) for name in weights[0]}
        written, bugs = vitals.log_bytes(cluster), vitals.bugs(cluster)
        print(f"\n{fuzzer.tally.report()}\n{neighbour.report()}")
        for name in growth:
            sizes = " ".join(f"{each[name]:.0f}" for each in weights)
            print(f"{name}: {sizes} MiB, {growth[name]:+.1f} since the warm-up, {written[name]:,} bytes of log")
        print("\n".join(bugs))

        assert cluster.died == []
        assert await vitals.serving(cluster, deployment.health, deployment.metrics) == []
        assert neighbour.faults == []
        assert fuzzer.tally.broken == {}
        assert fuzzer.stuck == []
        assert bugs == []
        assert max(written.values()) < MAX_LOG_BYTES
        assert [name for name in growth if growth[name] >= MAX_GROWTH_MIB[name.partition("-")[0]]] == []


def growth_of(weights: list[float]) -> float:
    """Return the growth from the end of warm-up to the end, in MiB."""
    return median(weights[LAST]) - median(weights[FIRST])


async def weight_after(cluster: Cluster, fuzzer: Fuzzer, messages: int) -> dict[str, float]:
    """Return the memory of each pod in MiB, at rest after `messages` messages."""
    await fuzzer.run(messages)
    await vitals.at_rest(cluster)
    return vitals.memory(cluster)
