"""Nothing that arrives can stop the services: every port is called in every wrong way, and two callers with manners
notice nothing of it.

A hundred thousand messages take some minutes: python -m pytest -s -m verify tests/hostile/test_fuzz.py
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.faults.cluster import Cluster, Models
from tests.hostile import vitals
from tests.hostile.fuzz import Fuzzer
from tests.hostile.neighbour import Neighbour

SEED = 2026
ROUNDS = 10
"""After each everything comes to rest, and is weighed. The first two warm up."""

WARM_ROUNDS = 2

MOST_LOG_BYTES = 20_000_000
"""Of a pod, whatever it is told."""

MOST_GROWTH_MIB = 32.0
"""Of a pod, from the end of the warm-up on."""


@asynccontextmanager
async def deployed(models: Models, logs: Path) -> AsyncIterator[Cluster]:
    cluster = Cluster(models, logs).deploy(verifiers=2, drafts=1, orchestrators=1)
    with cluster:
        await cluster.make_whole()
        yield cluster


@pytest.mark.parametrize(
    "messages",
    [
        1_500,
        pytest.param(100_000, marks=[pytest.mark.verify, pytest.mark.timeout(2400)]),
    ],
)
async def test_nothing_that_arrives_stops_them(models: Models, tmp_path: Path, messages: int) -> None:
    async with deployed(models, tmp_path) as cluster:
        roles = ("verifier", "draft", "orchestrator")
        fuzzer = Fuzzer({role: [pod.address for pod in cluster.of(role)] for role in roles}, SEED)
        neighbour = Neighbour(cluster.address)
        await neighbour.first()
        asking = asyncio.create_task(neighbour.ask_on())
        weights = []
        for _ in range(ROUNDS):
            await fuzzer.run(messages // ROUNDS)
            await vitals.at_rest(cluster)
            weights.append(vitals.memory(cluster))
        asking.cancel()
        await neighbour.ask()
        await neighbour.close()

        growth = {name: weights[-1][name] - weights[WARM_ROUNDS - 1][name] for name in weights[0]}
        written = vitals.log_bytes(cluster)
        print(f"\n{fuzzer.tally.report()}\n{neighbour.report()}")
        for name in growth:
            sizes = " ".join(f"{each[name]:.0f}" for each in weights)
            print(f"{name}: {sizes} MiB, {growth[name]:+.1f} since the warm-up, {written[name]:,} bytes of log")
        bugs = vitals.bugs(cluster)
        print("\n".join(bugs))

        assert cluster.died == []
        assert await vitals.serving(cluster) == []
        assert neighbour.faults == []
        assert fuzzer.tally.broken == {}
        assert fuzzer.stuck == []
        assert bugs == []
        assert max(written.values()) < MOST_LOG_BYTES
        assert max(growth.values()) < MOST_GROWTH_MIB
