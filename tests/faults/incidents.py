"""Injects six faults and records the dashboard of each, for a reader to identify with the runbooks.

    python -m tests.faults.incidents FOLDER [--seed 1]

FOLDER gets `incident-1.md` to `incident-6.md`, in random order: every curve of the dashboard every four seconds,
starting before the fault. `answers.json` names each fault. The program needs `prometheus` on the path, and six minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from specdec.client import AsyncClient
from tests.deploy.expressions import panels
from tests.faults.cluster import Cluster, Models
from tests.faults.disturbances import asking, foreign, stuttering
from tests.faults.pods import Pod, free_address
from tests.faults.prometheus import Prometheus, here
from tests.models import make, near

BEFORE_SECONDS, DURING_SECONDS = 16.0, 28.0
EVERY_SECONDS = 4


@dataclass(frozen=True)
class Incident:
    """A small deployment under load, with its faults to inject."""

    cluster: Cluster
    client: AsyncClient

    @property
    def verifiers(self) -> list[Pod]:
        return self.cluster.of("verifier")

    @property
    def draft(self) -> Pod:
        return self.cluster.of("draft")[0]


@asynccontextmanager
async def killed_draft(incident: Incident) -> AsyncIterator[None]:
    incident.draft.kill()
    yield


@asynccontextmanager
async def frozen_verifier(incident: Incident) -> AsyncIterator[None]:
    incident.verifiers[0].freeze()
    yield


@asynccontextmanager
async def flood(incident: Incident) -> AsyncIterator[None]:
    async with asking(incident.client, 40, 400):
        yield


@asynccontextmanager
async def slow_verifier(incident: Incident) -> AsyncIterator[None]:
    async with stuttering(incident.verifiers[0]), stuttering(incident.verifiers[1]):
        yield


@asynccontextmanager
async def slow_draft(incident: Incident) -> AsyncIterator[None]:
    async with stuttering(incident.draft):
        yield


@asynccontextmanager
async def draft_of_another_tokenizer(incident: Incident) -> AsyncIterator[None]:
    """Restart the draft as after a rollout with the wrong model."""
    incident.draft.kill()
    await incident.draft.until_ended()
    incident.cluster.spares["wrong"].start()
    yield


FAULTS: dict[str, Callable[[Incident], AbstractAsyncContextManager[None]]] = {
    "the draft died": killed_draft,
    "one of two verifiers stands still": frozen_verifier,
    "more is asked for than there is room for": flood,
    "verifiers are slow": slow_verifier,
    "the draft is slow": slow_draft,
    "the draft has another tokenizer": draft_of_another_tokenizer,
}


async def observe(fault: str, models: Models, folder: Path) -> str:
    """Inject a fault, and return the dashboard as text."""
    targets: list[str] = []

    def metrics() -> tuple[str, str]:
        targets.append(free_address())
        return ("--metrics-port", targets[-1].rpartition(":")[2])

    with Cluster(models, folder) as cluster:
        verifiers = [cluster.verifier(*metrics(), "--kv-tokens", "2048", "--max-waiting", "8") for _ in range(2)]
        draft = cluster.draft(*metrics())
        model, ports = foreign(models, folder / "foreign"), ("--metrics-port", targets[-1].rpartition(":")[2])
        options = ("--model", str(model), "--engine", "torch", "--threads", "1", *ports)
        cluster.spares["wrong"] = Pod("wrong", "draft_service", draft.address, options, folder / "wrong.log")
        cluster.orchestrator([pod.address for pod in verifiers], [draft.address], *metrics())
        await cluster.make_whole()
        with Prometheus(folder / "prometheus", targets, "groups: []") as prometheus:
            await prometheus.until_ready()
            async with AsyncClient(cluster.address, timeout=60.0, max_retries=0) as client, asking(client, 4, 120):
                await asyncio.sleep(BEFORE_SECONDS + 8)  # rates need values from before the fault
                async with FAULTS[fault](Incident(cluster, client)):
                    await asyncio.sleep(DURING_SECONDS)
                    return await shown(prometheus, time.time() - BEFORE_SECONDS - DURING_SECONDS)


async def shown(prometheus: Prometheus, since: float) -> str:
    """Return all panels as tables, from `since` to now."""
    times = range(0, int(BEFORE_SECONDS + DURING_SECONDS) + 1, EVERY_SECONDS)
    lines = [
        f"Every curve of the dashboard, every {EVERY_SECONDS} s. Something happened after {BEFORE_SECONDS:.0f} s.",
        "",
    ]
    for panel in panels():
        unit = panel["fieldConfig"]["defaults"]["unit"]
        lines += [f"## {panel['title']} ({unit})", "", "| curve | " + " | ".join(f"{each} s" for each in times) + " |"]
        lines.append("|---" * (len(times) + 1) + "|")
        for target in panel["targets"]:
            found = await prometheus.values(here(target["expr"]), since, EVERY_SECONDS)
            for labels, values in found:
                name = target["legendFormat"]
                for label, value in labels.items():
                    name = name.replace("{{" + label + "}}", value)
                cells = [values.get(each, math.nan) for each in times]
                told = ["" if math.isnan(cell) else f"{cell:.3g}" for cell in cells]
                lines.append(f"| {name} | " + " | ".join(told) + " |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    order = random.Random(args.seed).sample(sorted(FAULTS), len(FAULTS))
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        target = make("llama", root / "target", max_position_embeddings=1024)
        models = Models(target, near(target, root / "draft", noise=0.04), target)
        for number, fault in enumerate(order, 1):
            (root / str(number)).mkdir()
            text = asyncio.run(observe(fault, models, root / str(number)))
            (args.folder / f"incident-{number}.md").write_text(f"# Incident {number}\n\n{text}")
            print(f"incident-{number}.md is written", flush=True)
    (args.folder / "answers.json").write_text(json.dumps(dict(enumerate(order, 1)), indent=1))


if __name__ == "__main__":
    main()
