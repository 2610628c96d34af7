"""The long scenarios. To run one of them:

python -m pytest -s -m verify tests/faults -k storm
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from specdec.client import Unavailable
from specdec.v2.draft_pb2 import DraftRequest
from specdec.v2.verifier_pb2 import VerifyRequest
from testing.padded_model import pad_model
from tests.faults.asks import Ask, asks
from tests.faults.cluster import Cluster, Models
from tests.faults.conftest import client_of
from tests.faults.history import Record, undisturbed, wrong_by_itself
from tests.faults.network import BadNetwork
from tests.faults.nonsense import call_with_nonsense
from tests.faults.rogue import RogueVerifier
from tests.faults.scenario import After, Ended, Event, Ready, Received, Run, kills, rolling_restart
from tests.faults.security import Security
from tests.margins import Oracle
from tests.stack import served

pytestmark = [pytest.mark.verify, pytest.mark.timeout(1200)]

STREAMS = 500
AT_ONCE = 48
MIN_FLIPPED = 20


@asynccontextmanager
async def deployed(cluster: Cluster, asked: list[Ask]) -> AsyncIterator[dict[int, Record]]:
    """Yield plain decoding's records on the whole cluster without faults."""
    with cluster:
        await cluster.make_whole()
        async with client_of(cluster) as client:
            yield await undisturbed(client, asked)


async def play(cluster: Cluster, asked: list[Ask], events: Iterator[Event] | list[Event], at_once: int) -> Run:
    async with client_of(cluster) as client:
        run = await Run(cluster).play(client, asked, events, at_once)
    print(f"\n{run.report()}")
    return run


@pytest.mark.parametrize(("rule", "secured"), [("coupled", False), ("coupled", True), ("rejection", False)])
async def test_storm(models: Models, oracle: Oracle, tmp_path: Path, rule: str, secured: bool) -> None:
    """Pods of every role are killed and restarted at random, with and without mutual TLS and API keys: no text is lost,
    and no text differs."""
    asked = asks(STREAMS, seed=11, tokens=(100, 400), rule=rule)
    security = Security(tmp_path / "security") if secured else None
    cluster = Cluster(models, tmp_path, security).deploy(verifiers=2, drafts=2, orchestrators=2)
    async with deployed(cluster, asked) as wants:
        # vLLM verifiers take longer to start, and some should be running.
        seconds, gap = (200, (4.0, 16.0)) if models.on_vllm else (90, (0.5, 3.0))
        events = kills(seed=12, pods=list(cluster.pods), seconds=seconds, gap=gap)
        run = await play(cluster, asked, events, AT_ONCE)
        assert run.faults(wants, oracle) == []
        killed = {event.whom.partition("-")[0] for _, event in run.timeline if event.do == "kill"}
        assert killed == {"verifier", "draft", "orchestrator"}
        assert run.failover_events["verifier_lost"]
        assert run.failover_events["resumed"]
    print(f"{oracle.compared} tokens compared, {len(oracle.ties)} ties")


async def test_another_revision(models: Models, oracle: Oracle, tmp_path: Path) -> None:
    """A verifier restarts with another model: unfinished texts end with MODEL_CHANGED, and none is spliced."""
    asked = asks(64, seed=21, tokens=(200, 400), min_tokens=200)
    cluster = Cluster(models, tmp_path).deploy(verifiers=1, drafts=1, orchestrators=2)
    cluster.stand_in("revised", "verifier-0", model=models.revision)
    async with deployed(cluster, asked) as wants:
        run = await play(
            cluster,
            asked,
            [
                Event(Received(6000), "kill", "verifier-0"),  # some texts are over, others in progress
                Event(Ended("verifier-0"), "start", "revised"),
                Event(Ready("revised")),
                Event(Received(2000)),
            ],
            at_once=16,
        )
        async with client_of(cluster) as client:
            revised = await undisturbed(client, asked)
        assert cluster.died == []
    seen: Counter[str] = Counter()
    for number, record in run.records:
        want = wants[number].tokens
        if record.error is None:
            assert not wrong_by_itself(record)
            both = {"first": want, "revision": revised[number].tokens}
            seen[next((name for name, tokens in both.items() if tokens == record.tokens), "spliced")] += 1
        else:
            assert isinstance(record.error, Unavailable)
            seen[record.error.reason] += 1
            assert record.tokens == want[: len(record.tokens)]
    print(f"streams: {dict(seen)}")
    assert seen.keys() == {"first", "revision", "MODEL_CHANGED"}


async def test_a_frozen_verifier(models: Models, oracle: Oracle, tmp_path: Path) -> None:
    """The streams of a frozen verifier continue elsewhere within 3 s."""
    asked = asks(100, seed=31, tokens=(200, 400))
    cluster = Cluster(models, tmp_path).deploy(verifiers=2, drafts=1, orchestrators=1)
    async with deployed(cluster, asked) as wants:
        events = []
        for turn in range(6):
            verifier = f"verifier-{turn % 2}"
            events += [
                Event(Received(1500), "freeze", verifier),
                Event(After(5), "thaw", verifier),
                Event(After(3)),
            ]
        run = await play(cluster, asked, events, at_once=12)
        assert run.faults(wants, oracle) == []
    assert run.failover_events["verifier_lost"]
    assert run.longest_pause <= 3.0


async def test_a_frozen_orchestrator(models: Models, oracle: Oracle, tmp_path: Path) -> None:
    """Clients notice a frozen orchestrator within their keepalive, 20 s and 10 s, and continue at the other one."""
    asked = asks(60, seed=51, tokens=(200, 400))
    cluster = Cluster(models, tmp_path).deploy(verifiers=1, drafts=1, orchestrators=2)
    async with deployed(cluster, asked) as wants:
        events = [
            Event(Received(1500), "freeze", "orchestrator-0"),
            Event(After(45), "thaw", "orchestrator-0"),
            Event(After(3)),
        ]
        run = await play(cluster, asked, events, at_once=12)
        assert run.faults(wants, oracle) == []
    assert run.failover_events["resumed"]
    assert run.longest_pause <= 35.0


async def test_rolling_restart(models: Models, oracle: Oracle, tmp_path: Path) -> None:
    """Every draft and verifier drains and restarts, and no request fails."""
    asked = asks(100, seed=41, tokens=(200, 400))
    cluster = Cluster(models, tmp_path).deploy(verifiers=2, drafts=2, orchestrators=2)
    async with deployed(cluster, asked) as wants:
        pods = [name for name in cluster.pods if not name.startswith("orchestrator")]
        run = await play(cluster, asked, rolling_restart(pods * 2, pause=1.0), at_once=16)
        assert run.faults(wants, oracle) == []
    assert not run.failover_events["resumed"]


async def test_a_frozen_draft(models: Models, oracle: Oracle, tmp_path: Path) -> None:
    """The text continues at plain speed within a second, and at drafted speed within five seconds of the draft's
    return. The target is padded and the draft is not, so that drafting pays on any machine."""
    pad_model(models.target, tmp_path / "padded", 60_000_000)
    always = {"speculation": "always"}  # on a busy machine it might not pay
    asked = asks(1, seed=81, tokens=(900, 900), **always)
    cluster = Cluster(models, tmp_path)
    cluster.orchestrator(
        [cluster.verifier(model=tmp_path / "padded").address], [cluster.draft(model=models.target).address]
    )
    with cluster:
        await cluster.make_whole()
        off = [Ask(ask.prompt, ask.options | {"speculation": "off"}) for ask in asked]
        before = await play(cluster, off, [Event(After(12))], at_once=1)
        run = await play(
            cluster,
            asked,
            [
                Event(After(12), "freeze", "draft-0"),
                Event(After(8), "thaw", "draft-0"),
                Event(After(15)),
            ],
            at_once=1,
        )
        after = await play(cluster, off, [Event(After(12))], at_once=1)
        assert cluster.died == []
    (frozen, _), (thawed, _) = run.timeline
    speeds = {
        # The slower of two runs, since other processes may slow the machine down.
        "plain": min(plain.speed(plain.began + 2, plain.began + 12) for plain in (before, after)),
        "drafted": run.speed(frozen - 8, frozen),
        "frozen, first second": run.speed(frozen, frozen + 1),
        "frozen, then": run.speed(frozen + 1, thawed),
        "thawed, first five seconds": run.speed(thawed, thawed + 5),
        "thawed, then": run.speed(thawed + 5, thawed + 15),
    }
    for name, (rate, step) in speeds.items():
        print(f"{name}: {rate:.1f} tokens a second, {step:.2f} a step")
    assert speeds["drafted"][1] > 1.5  # otherwise the test shows nothing
    assert speeds["frozen, then"][0] > 0.8 * speeds["plain"][0]
    assert speeds["thawed, then"][1] > 0.8 * speeds["drafted"][1]


def corruptions(network: BadNetwork) -> Iterator[Event]:
    """Yield two hundred corruptions, then more until enough bits were flipped, since an idle draft receives no data."""
    for number in itertools.count():
        if number >= 200 and network.flipped > MIN_FLIPPED:
            return
        yield Event(After(0.15), "corrupt", "network")


@pytest.mark.parametrize("role", ["verifier", "draft"])
async def test_a_corrupting_network(models: Models, oracle: Oracle, tmp_path: Path, role: str) -> None:
    """Bits are flipped between an orchestrator and a pod: streams of the other orchestrator are unaffected."""
    asked = asks(60, seed=51, tokens=(100, 300), speculation="always")  # so that both links have traffic
    cluster = Cluster(models, tmp_path)
    async with BadNetwork(seed=52) as network:
        verifiers = [cluster.verifier().address for _ in range(2)]
        drafts = [cluster.draft().address]
        through = {"verifier": verifiers, "draft": drafts}
        through[role] = [await network.to(through[role][0]), *through[role][1:]]
        bad = cluster.orchestrator(through["verifier"], through["draft"])
        good = cluster.orchestrator(verifiers, drafts)
        async with (
            deployed(cluster, asked) as wants,
            client_of(cluster, good.address) as here,
            client_of(cluster, bad.address) as there,
        ):
            watched, disturbed = Run(cluster), Run(cluster, network=network)
            await asyncio.gather(
                watched.play(here, asked, [Event(After(30))], at_once=6),
                disturbed.play(there, asked, corruptions(network), at_once=6),
            )
            print(f"\n{network.flipped} bits flipped; there: {disturbed.report()}\nhere: {watched.report()}")
            found = Counter(fault.partition(": ")[2][-90:] for fault in disturbed.faults(wants, oracle))
            print(f"faults where bits were flipped: {dict(found)}")
            assert watched.faults(wants, oracle) == []
            assert not found
            for _, record in disturbed.records:
                assert record.error is not None or record.finish is not None  # all ended, and with a status


async def test_a_rogue_verifier(models: Models, oracle: Oracle, tmp_path: Path) -> None:
    """One of two verifiers occasionally breaks the protocol: no token differs, and no pod dies."""
    asked = asks(100, seed=61, tokens=(100, 300))
    cluster = Cluster(models, tmp_path)
    good = cluster.verifier().address
    rogue = RogueVerifier(good, seed=62)
    async with served(rogue) as (bad, _):
        drafts = [cluster.draft().address]
        cluster.orchestrator([bad, good], drafts)
        cluster.orchestrator([good, bad], drafts)
        with cluster:
            await cluster.make_whole()
            async with client_of(cluster) as client:
                wants = await undisturbed(client, asked)
                rogue.odds = 0.05
                run = await Run(cluster).play(client, asked, [Event(After(20))], at_once=12)
            print(f"\nbroke the protocol {rogue.broken} times\n{run.report()}")
            assert run.faults(wants, oracle) == []
    assert rogue.broken > 50


async def test_rogue_callers(models: Models, oracle: Oracle, tmp_path: Path) -> None:
    """Nonsense from callers of draft and verifier: other streams are unaffected, and the pods survive."""
    asked = asks(60, seed=71, tokens=(100, 300))
    cluster = Cluster(models, tmp_path).deploy(verifiers=1, drafts=1, orchestrators=1)
    async with deployed(cluster, asked) as wants:
        verifier, draft = cluster.pods["verifier-0"].address, cluster.pods["draft-0"].address
        calling = [
            asyncio.create_task(call_with_nonsense(verifier, VerifyRequest, "VerifierService/Verify", seed=72)),
            asyncio.create_task(call_with_nonsense(draft, DraftRequest, "DraftService/Draft", seed=73)),
        ]
        run = await play(cluster, asked, [Event(After(15))], at_once=12)
        for task in calling:
            task.cancel()
        statuses = await asyncio.gather(*calling)
        print(f"answers to nonsense: {[dict(each) for each in statuses]}")
        assert run.faults(wants, oracle) == []
        assert all(each.total() > 50 for each in statuses)
