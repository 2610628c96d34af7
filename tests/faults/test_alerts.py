"""A real Prometheus scrapes real services: alerts fire on their faults, and every expression has values."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from specdec.client import AsyncClient
from specdec.client.errors import Overloaded
from tests.deploy.expressions import RULES, alerts, curves
from tests.faults.cluster import Cluster, Models
from tests.faults.disturbances import asking, asking_by_http, foreign, stuttering
from tests.faults.pods import Pod, free_address
from tests.faults.prometheus import Prometheus, here, hurried

pytestmark = [
    pytest.mark.verify,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed"),
]

SECONDS = 150.0
"""Time limit of the whole test in seconds."""

FIRE_SECONDS = 40.0
"""Seconds within which a justified alert fires."""

FAILOVER_SECONDS = 15
SLOW_SECONDS = 8.0  # longer than a first token may take, shorter than a text waits for its verifier

NOT_HERE = {
    "SpecdecEngineFailed": "takes an engine that fails",
    "SpecdecVersionSkew": "takes another version",
    "SpecdecCandidatesRefused": "takes a draft that lies",
    "SpecdecOrchestratorBusy": "takes a core of its own to be used up",
    "SpecdecFileRefused": "takes files that are watched",
    "SpecdecRevisionFails": "takes two revisions of a model",
    "SpecdecRevisionSlow": "takes two revisions of a model",
    "SpecdecDraftVersionRolledBack": "takes versions of a draft",
    "SpecdecDraftLate": "depends on the machine",
    "SpecdecSpeculationOff": "depends on the machine",
}
"""Alerts not triggered here, each with the reason; they may fire."""


class Watch:
    """Collects the alerts that fire."""

    def __init__(self, prometheus: Prometheus) -> None:
        self._prometheus = prometheus
        self.fired: set[str] = set()
        self.said: set[str] = set()

    async def until_fired(self, *names: str) -> None:
        """Wait until each of these has fired; raise AssertionError if one does not."""
        fire = await self.fire(*names, seconds=FIRE_SECONDS)
        assert fire, f"{sorted(set(names) - self.fired)} do not fire; so far: {sorted(self.fired)}"

    async def fire(self, *names: str, seconds: float) -> bool:
        """Return True as soon as all of these have fired, or False after `seconds`."""
        deadline = time.monotonic() + seconds
        while set(names) - self.fired:
            if time.monotonic() >= deadline:
                return False
            for name, descriptions in (await self._prometheus.alerts()).items():
                self.fired.add(name)
                self.said.update(descriptions)
            await asyncio.sleep(0.25)
        return True

    async def until_calm(self) -> None:
        """Wait until no critical alert fires; TimeoutError if one persists."""
        critical = {alert.name for alert in alerts() if alert.severity == "critical"}
        async with asyncio.timeout(FIRE_SECONDS):
            while critical & (await self._prometheus.alerts()).keys():
                await asyncio.sleep(0.25)


@contextlib.asynccontextmanager
async def begun(client: AsyncClient, count: int) -> AsyncIterator[None]:
    """Hold this number of texts in progress, past their first tokens and far from their ends."""
    async with contextlib.AsyncExitStack() as texts:
        while count:
            text = client.generate("long", max_tokens=300, ignore_end_token=True, seed=count)
            try:
                await anext(await texts.enter_async_context(text))
                count -= 1
            except Overloaded:
                await asyncio.sleep(0.1)
        yield


async def test_alerts_fire_for_what_they_are_for(models: Models, tmp_path: Path) -> None:
    begin = time.time()
    targets = {role: free_address() for role in ("verifier", "draft", "odd", "orchestrator", "openai")}
    scraped = Prometheus(tmp_path / "prometheus", list(targets.values()), hurried(RULES.read_text()))

    def metrics(role: str) -> tuple[str, str]:
        return ("--metrics-port", targets[role].rpartition(":")[2])

    with Cluster(models, tmp_path) as cluster, scraped as prometheus:
        # 1. A small healthy deployment, except for one draft with another model and a disabled fast path.
        verifier = cluster.verifier(*metrics("verifier"), "--kv-tokens", "1536", "--max-waiting", "4")
        draft = cluster.draft(*metrics("draft"))
        model = str(foreign(models, tmp_path / "foreign"))
        options = ("draft_service", "--model", model, "--engine", "torch", "--threads", "1", *metrics("odd"))
        odd = Pod("odd", "tests.services.a_path_off", free_address(), options, tmp_path / "odd.log")
        cluster.pods["odd"] = odd
        patience = ("--failover-seconds", str(FAILOVER_SECONDS))
        drafts = [draft.address, odd.address]
        orchestrator = cluster.orchestrator([verifier.address], drafts, *metrics("orchestrator"), *patience)
        before = ("--orchestrator", orchestrator.address, *metrics("openai"))
        http = Pod("openai", "specdec.openai_api", free_address(), before, tmp_path / "openai.log")
        cluster.pods["openai"] = http
        await cluster.make_whole()
        await prometheus.until_ready()
        async with (
            asyncio.timeout(SECONDS),
            AsyncClient(cluster.address, timeout=60.0, max_retries=0) as client,
            asking(client, 3, 80),
            asking_by_http(http.address),
        ):
            at_first = Watch(prometheus)
            await at_first.until_fired("SpecdecPodUnfit", "SpecdecFastPathOff")
            await at_first.until_calm()
            watch = Watch(prometheus)

            # 2. The draft dies, again and again.
            draft.kill()
            await watch.until_fired("SpecdecPodDown", "SpecdecPodLeftAlone", "SpecdecDraftFallback")
            restarts = f'changes(process_start_time_seconds{{instance="{targets["draft"]}"}}[60s])'
            for number in (1, 2, 3):
                draft.kill()
                await draft.until_ended()
                draft.start()
                await draft.until_ready()
                await prometheus.until(f"{restarts} >= {number}")
            await watch.until_fired("SpecdecRestarts")

            # 3. More texts are requested than there is room for.
            async with asking(client, 24, 500):
                await watch.until_fired("SpecdecQueue", "SpecdecKVCacheFull", "SpecdecPreemptions", "SpecdecOverloaded")

            # 4. The verifier stands still, then stutters.
            async with asking(client, 8, 500), begun(client, 1):
                verifier.freeze()
                await watch.until_fired("SpecdecNoVerifier", "SpecdecVerifierLost")
            for _ in range(4):  # earlier texts may fill the verifier when it thaws, and most waiting ones are refused
                async with asking(client, 8, 60):
                    verifier.freeze()
                    await asyncio.sleep(SLOW_SECONDS)
                    verifier.thaw()
                    if await watch.fire("SpecdecFirstTokenSlow", seconds=5.0):
                        break
            await watch.until_fired("SpecdecFirstTokenSlow")
            async with stuttering(verifier):
                await watch.until_fired("SpecdecTokensSlow", "SpecdecStepsSlower")

            # 5. The verifier dies for good, and so do the texts begun on it.
            verifier.kill()
            await watch.until_fired("SpecdecErrors", "SpecdecHttpErrors", "SpecdecNotServing", "SpecdecGoodputLow")

        assert at_first.fired | watch.fired | NOT_HERE.keys() == {alert.name for alert in alerts()}
        assert not [said for said in watch.said if "<error" in said]  # the output of a failing template
        expressions = [expression for alert in alerts() for expression in alert.operands] + curves()
        empty = [each for each in expressions if not await prometheus.has_values(here(each), begin)]
    assert not empty, "\n".join(empty)
