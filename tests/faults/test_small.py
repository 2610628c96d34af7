"""Faults of the everyday kind, each in a few seconds, on pods that the tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.asks import asks
from tests.faults.cluster import Cluster, Models
from tests.faults.conftest import client_of
from tests.faults.history import Record, undisturbed
from tests.faults.scenario import After, Ended, Event, Ready, Received, Run
from tests.margins import Oracle

ASKS = asks(24, seed=1)


@pytest.fixture(scope="module")
def pods(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(models, tmp_path_factory.mktemp("logs")) as made:
        yield made.deploy(verifiers=1, drafts=1, orchestrators=2)


@pytest.fixture(scope="module")
def wants() -> dict[int, Record]:
    return {}  # filled by whoever comes first


async def play(pods: Cluster, wants: dict[int, Record], oracle: Oracle, *events: Event) -> Run:
    await pods.make_whole()
    async with client_of(pods.address) as client:
        if not wants:
            wants.update(await undisturbed(client, ASKS))
        run = await Run(pods, {}).play(client, ASKS, events, at_once=12)
    print(run.report())
    assert run.faults(wants, oracle) == []
    return run


async def test_nothing_happens(pods: Cluster, wants: dict[int, Record], oracle: Oracle) -> None:
    run = await play(pods, wants, oracle)
    assert not any(r.finish and r.finish.speculation.switches for _, r in run.records)


async def test_an_orchestrator_is_killed(pods: Cluster, wants: dict[int, Record], oracle: Oracle) -> None:
    run = await play(
        pods,
        wants,
        oracle,
        Event(Received(500), "kill", "orchestrator-0"),
        Event(Ended("orchestrator-0"), "start", "orchestrator-0"),
        Event(Ready("orchestrator-0")),
        Event(Received(300), "kill", "orchestrator-1"),
    )
    assert any(r.finish and r.finish.speculation.switches.get("resumed") for _, r in run.records)


async def test_a_draft_is_killed(pods: Cluster, wants: dict[int, Record], oracle: Oracle) -> None:
    await play(pods, wants, oracle, Event(Received(500), "kill", "draft-0"), Event(Received(500), "start", "draft-0"))


async def test_a_draft_is_frozen(pods: Cluster, wants: dict[int, Record], oracle: Oracle) -> None:
    await play(pods, wants, oracle, Event(Received(500), "freeze", "draft-0"), Event(After(2), "thaw", "draft-0"))
