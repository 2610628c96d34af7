"""Everyday faults, a second or two each, on shared pods."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from tests.faults.asks import asks
from tests.faults.cluster import Cluster, Models
from tests.faults.conftest import client_of
from tests.faults.history import Record, undisturbed
from tests.faults.scenario import After, Ended, Event, Ready, Received, Run, rolling_restart
from tests.faults.security import Security
from tests.margins import Oracle

ASKS = asks(12, seed=1, tokens=(150, 300), speculation="always")  # on a busy machine drafts might not pay


@pytest.fixture(scope="module", params=["open", pytest.param("secured", marks=pytest.mark.verify)])
def pods(models: Models, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Without TLS, and with mutual TLS and API keys."""
    folder = tmp_path_factory.mktemp("logs")
    security = Security(folder / "security") if request.param == "secured" else None
    with Cluster(models, folder, security) as made:
        yield made.deploy(verifiers=2, drafts=2, orchestrators=2)


@pytest.fixture(scope="module")
def wants(pods: Cluster) -> dict[int, Record]:
    return {}  # filled by the first test that runs


async def play(pods: Cluster, wants: dict[int, Record], oracle: Oracle, *events: Event) -> Counter[str]:
    """Return the failover events of all streams; no stream may be lost or different."""
    await pods.make_whole()
    async with client_of(pods) as client:
        if not wants:
            wants.update(await undisturbed(client, ASKS))
        run = await Run(pods).play(client, ASKS, events, at_once=12)
    print(f"\n{run.report()}")
    assert run.faults(wants, oracle) == []
    return run.failover_events


@pytest.mark.verify
async def test_nothing_happens(pods: Cluster, wants: dict[int, Record], oracle: Oracle) -> None:
    failover_events = await play(pods, wants, oracle)
    assert not failover_events["resumed"]
    assert not failover_events["verifier_lost"]


@pytest.mark.verify
async def test_a_verifier_is_killed(pods: Cluster, wants: dict[int, Record], oracle: Oracle) -> None:
    failover_events = await play(
        pods,
        wants,
        oracle,
        Event(Received(500), "kill", "verifier-0"),
        Event(Ended("verifier-0"), "start", "verifier-0"),
        Event(Ready("verifier-0")),
        Event(Received(300), "kill", "verifier-1"),
    )
    assert failover_events["verifier_lost"]
    assert not failover_events["resumed"]  # clients resume only if an orchestrator is lost


async def test_both_verifiers_are_killed(pods: Cluster, wants: dict[int, Record], oracle: Oracle) -> None:
    failover_events = await play(
        pods,
        wants,
        oracle,
        Event(Received(500), "kill", "verifier-0"),
        Event(After(0), "kill", "verifier-1"),
        Event(After(1)),
        Event(Ended("verifier-1"), "start", "verifier-1"),
    )
    assert failover_events["verifier_lost"]


async def test_an_orchestrator_is_killed(pods: Cluster, wants: dict[int, Record], oracle: Oracle) -> None:
    failover_events = await play(
        pods,
        wants,
        oracle,
        Event(Received(500), "kill", "orchestrator-0"),
        Event(Ended("orchestrator-0"), "start", "orchestrator-0"),
        Event(Ready("orchestrator-0")),
        Event(Received(300), "kill", "orchestrator-1"),
    )
    assert failover_events["resumed"]


@pytest.mark.verify
async def test_drafts_are_killed(pods: Cluster, wants: dict[int, Record], oracle: Oracle) -> None:
    await play(
        pods,
        wants,
        oracle,
        Event(Received(500), "kill", "draft-0"),
        Event(Received(500), "kill", "draft-1"),
        Event(Received(500)),
        Event(Ended("draft-0"), "start", "draft-0"),
    )


async def test_verifiers_and_a_draft_are_frozen(pods: Cluster, wants: dict[int, Record], oracle: Oracle) -> None:
    """Both verifiers are frozen in turn, since all texts may be at the one with their prefixes cached."""
    failover_events = await play(
        pods,
        wants,
        oracle,
        Event(Received(500), "freeze", "draft-0"),
        Event(Received(500), "freeze", "verifier-0"),
        Event(After(4), "thaw", "verifier-0"),
        Event(Received(500), "freeze", "verifier-1"),
        Event(After(4), "thaw", "verifier-1"),
        Event(After(0), "thaw", "draft-0"),
    )
    assert failover_events["verifier_lost"]


@pytest.mark.verify
async def test_one_of_each_is_restarted(pods: Cluster, wants: dict[int, Record], oracle: Oracle) -> None:
    await play(pods, wants, oracle, *rolling_restart(["verifier-0", "draft-0", "orchestrator-0"], pause=0.2))


@pytest.mark.verify
async def test_certificates_and_keys_are_renewed(pods: Cluster, wants: dict[int, Record], oracle: Oracle) -> None:
    """They are renewed twice, under load: no request fails."""
    if pods.security is None:
        pytest.skip("there are none")
    events = [Event(Received(800), "renew", "security") for _ in range(2)]
    failover_events = await play(pods, wants, oracle, *events, Event(Received(800)))
    assert not failover_events["verifier_lost"]
    assert not failover_events["resumed"]
