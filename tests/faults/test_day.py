"""A day in a cluster, compressed into minutes: clients send requests at Poisson times at most of its capacity, a random
pod is killed every 20 s, all pods are replaced one after the other, and the model is rolled out to another revision,
back, and out again. No request fails, and each text equals its revision's text without faults.

SPECDEC_DAY_SECONDS=900 python -m pytest -s -m verify tests/faults/test_day.py
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from heapq import merge
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tests.faults.asks import Ask, asks
from tests.faults.cluster import Cluster, Models
from tests.faults.conftest import client_of
from tests.faults.history import Record, undisturbed, wrong
from tests.faults.rollout import Rollout
from tests.faults.scenario import After, At, Borne, Ended, Event, Ready, Run
from tests.margins import Oracle

pytestmark = [pytest.mark.verify, pytest.mark.timeout(3000)]

SECONDS = float(os.environ.get("SPECDEC_DAY_SECONDS", 240))
CALM_SECONDS = SECONDS / 8
"""Duration of the same load without faults, for comparison."""

KILL_SECONDS = 20.0

CAPACITY_SECONDS = 3 * KILL_SECONDS
AT_ONCE = 24
LOAD = 0.8
"""Load as a fraction of the capacity: requests completed with AT_ONCE in flight in the worst hour of the day. Then pods
are killed as on the day, a starting pod takes cores from the others (in a cluster it has its own), and each revision
has half of the requests, so that more pods share the cores, with smaller batches."""

UPGRADE_BEGINS, UPGRADE_APART = 0.2 * SECONDS, 0.015 * SECONDS
"""When the upgrade of the pods begins, and the minimum time between two pods."""

ROLLOUT = {"canary": 0.45, "half": 0.55, "forth": 0.65, "back": 0.75, "forth again": 0.85}
"""Changes of the shares, with their times as fractions of the day."""


def killed(pods: list[str], seconds: float) -> Iterator[tuple[float, str]]:
    """Yield (time, pod) of kills: a random order of all pods, again and again."""
    dice, left = random.Random(5), list[str]()
    for at in np.arange(KILL_SECONDS, seconds, KILL_SECONDS).tolist():
        left = left or dice.sample(pods, len(pods))
        yield at, left.pop()


def disturbed(pods: list[str], seconds: float) -> Iterator[Event]:
    """Yield the kills alone, in order."""
    for at, pod in killed(pods, seconds):
        yield Event(At(at), "kill", pod)
        yield Event(Ended(pod), "start", pod)
    yield Event(At(seconds))


def day(pods: list[str]) -> Iterator[Event]:
    kills = ((at, "kill", pod) for at, pod in killed(pods, SECONDS))
    upgrade = ((UPGRADE_BEGINS + UPGRADE_APART * number, "terminate", pod) for number, pod in enumerate(pods))
    shares = ((part * SECONDS, do.partition(" ")[0], "rollout") for do, part in ROLLOUT.items())
    before = 0.0
    for at, do, whom in merge(kills, upgrade, shares):
        # Where pods start slowly, the day is longer: otherwise the delayed events would come all together.
        yield Event(Borne(at - before), do, whom)
        before = at
        if whom != "rollout":
            yield Event(Ended(whom), "start", whom)
        if do == "terminate":
            yield Event(Ready(whom))
    yield Event(After(SECONDS - before))


def revision_of(seen: Record) -> str:
    """Return the revision named in a text's first chunk."""
    resolved = seen.chunks[0].resolved
    assert resolved is not None
    return resolved.model


def told(run: Run, seconds: float) -> str:
    """Return a line on what clients saw: seconds to the first token and between tokens, and goodput in tokens/s."""
    first = [seen.wait for _, seen in run.records if seen.chunks]
    gaps = [
        (late - early) / max(1, len(chunk.tokens))
        for _, seen in run.records
        for (early, late), chunk in zip(pairwise(seen.times), seen.chunks[1:], strict=True)
        for _ in chunk.tokens
    ]
    complete = sum(len(seen.tokens) for _, seen in run.records if seen.error is None)
    usual, late = np.quantile(first, [0.5, 0.99])
    between, long = 1000 * np.quantile(gaps, [0.5, 0.99])
    return (
        f"{len(run.records)} texts; first token p50 {usual:.2f} s, p99 {late:.2f} s; "
        f"between tokens p50 {between:.1f} ms, p99 {long:.1f} ms; "
        f"longest silence {run.longest_pause:.2f} s; goodput {complete / seconds:.0f} tokens/s"
    )


def faults(run: Run, wants: Mapping[str, Mapping[int, Record]], oracles: Mapping[str, Oracle]) -> list[str]:
    """Return the faults of each text, compared with its own revision's plain text."""
    found = []
    for number, seen in run.records:
        named = revision_of(seen) if seen.chunks else "m@a"
        if fault := wrong(seen, wants[named][number], oracles[named]):
            found.append(f"text {number} by {named}, {seen.ask.options}: {fault}")
    return found + [f"{name} died:\n{run.pod(name).log_tail()}" for name in run.cluster.died]


async def test_a_day(models: Models, oracle: Oracle, tmp_path: Path) -> None:
    asked = [Ask(each.prompt, each.options | {"model": "m"}) for each in asks(200, seed=71, tokens=(60, 200))]
    cluster = Cluster(models, tmp_path)
    drafts = [cluster.draft() for _ in range(2)]
    rollout = Rollout(
        tmp_path / "models.yaml",
        {
            "a": (models.target, [cluster.verifier() for _ in range(2)]),
            "b": (models.revision, [cluster.verifier(model=models.revision) for _ in range(2)]),
        },
        drafts,
    )
    for _ in range(2):
        cluster.orchestrator_of(rollout.file)
    oracles = {"m@a": oracle, "m@b": Oracle(models.revision)}
    with cluster:
        await cluster.make_whole()
        async with client_of(cluster) as client:
            wants = {
                name: await undisturbed(client, [Ask(each.prompt, each.options | {"model": name}) for each in asked])
                for name in oracles
            }
            rollout.half()
            full = Run(cluster)
            await full.play(client, asked, disturbed(list(cluster.pods), CAPACITY_SECONDS), AT_ONCE)
            rate = LOAD * len(full.records) / (time.monotonic() - full.began)
            rollout.back()
            await cluster.make_whole()
            calm = await Run(cluster).play_open(client, asked, [Event(At(CALM_SECONDS))], rate)
            run = Run(cluster, rollout=rollout)
            await run.play_open(client, asked, day(list(cluster.pods)), rate)
            seconds = time.monotonic() - run.began
        print(f"\n{rate:.2f} requests/s\ncalm: {told(calm, CALM_SECONDS)}\nday:  {told(run, seconds)}\n{run.report()}")
        assert faults(calm, wants, oracles) == []
        assert faults(run, wants, oracles) == []
    by = Counter(revision_of(seen) for _, seen in run.records)
    print(f"texts by revision: {dict(by)}")
    assert by.keys() == oracles.keys()
    assert run.failover_events["verifier_lost"]
    # It is chance whether an orchestrator had a text when it was killed: texts take a fifth of a second.
    killed_roles = {event.whom.partition("-")[0] for _, event in run.timeline if event.do == "kill"}
    assert killed_roles == {"draft", "verifier", "orchestrator"}
