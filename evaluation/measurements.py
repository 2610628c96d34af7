"""The measurements of a pair: acceptance by rule and tree, and the speed of each way to serve it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from evaluation import virtual_time
from evaluation.deployment import Deployment, Layout
from evaluation.pair import Pair
from evaluation.progress import Heard
from orchestrator.requests.sample import Sample
from specdec.decoding.sampling import Rule
from specdec.decoding.speculation import NO_DRAFTERS, OWN_DRAFTERS, CandidateSource, SpeculationOptions

REMOTE = frozenset({CandidateSource.REMOTE})

LONG_STEP = 0.5
"""Seconds of a step of the target, however many candidates it has: long enough for a draft to send all of them and for
all to pay, but too short for the target to count as lost."""


@dataclass(frozen=True)
class Tree:
    """The shape of a tree of candidates."""

    name: str
    candidates: int
    depth: int
    branches: int


TREES = (
    Tree("chain of 2", 2, 2, 1),
    Tree("chain of 4", 4, 4, 1),
    Tree("chain of 8", 8, 8, 1),
    Tree("tree of 16", 16, 8, 3),
    Tree("tree of 32", 32, 12, 3),
)


@dataclass(frozen=True)
class Way:
    """A way to serve the target: the layout, and the drafters allowed."""

    name: str
    layout: Layout
    speculation: SpeculationOptions


PLAIN = Way("plain", Layout(), SpeculationOptions(NO_DRAFTERS))
ABSENT = Way("no draft", Layout(), SpeculationOptions(OWN_DRAFTERS))
LOCAL = Way("local draft", Layout(local=True), SpeculationOptions(OWN_DRAFTERS))
REMOTE_DRAFT = Way("remote draft", Layout(remote=True), SpeculationOptions())
WAYS = (PLAIN, ABSENT, LOCAL, REMOTE_DRAFT)


@dataclass(frozen=True)
class Figures:
    """The results of running samples one way."""

    tokens: int
    seconds: float
    steps: int
    offered: int
    accepted: int
    target_busy: float  # share of the time spent in the target's passes
    draft_busy: float

    @property
    def rate(self) -> float:
        """Tokens a second, over all streams."""
        return self.tokens / self.seconds

    @property
    def acceptance(self) -> float:
        """Accepted candidates divided by verified ones."""
        return self.accepted / max(1, self.offered)

    @property
    def tokens_a_step(self) -> float:
        return self.tokens / max(1, self.steps)


@dataclass(frozen=True)
class Load:
    """Samples to run, `streams` at a time."""

    samples: Sequence[Sample]
    streams: int


def run(pair: Pair, layout: Layout, *loads: Load, heard: Heard = lambda tokens: None) -> list[Figures]:
    """Run loads on virtual time, one after the other: the services learn from each for the next. Prompts are not cached
    from one load to the next. `heard` is called with the planned tokens of every complete text."""

    async def main() -> list[Figures]:
        deployment = Deployment(pair, layout)
        found = []
        for number, load in enumerate(loads):
            samples = [replace(sample, cache_salt=f"{number} {sample.cache_salt}") for sample in load.samples]
            found.append(await _figures(deployment, samples, load.streams, heard))
        await deployment.end()
        return found

    return virtual_time.run(main())


async def _figures(deployment: Deployment, samples: Sequence[Sample], streams: int, heard: Heard) -> Figures:
    clock = asyncio.get_running_loop().time
    begin, target, draft = clock(), deployment.target.busy, deployment.draft.busy
    texts = await deployment.complete_all(samples, streams, heard)
    seconds = clock() - begin
    statistics = [text.finish.speculation for text in texts]
    return Figures(
        tokens=sum(len(text.tokens) for text in texts),
        seconds=seconds,
        steps=sum(statistic.steps for statistic in statistics),
        offered=sum(statistic.offered for statistic in statistics),
        accepted=sum(statistic.accepted for statistic in statistics),
        target_busy=(deployment.target.busy - target) / seconds,
        draft_busy=(deployment.draft.busy - draft) / seconds,
    )


def acceptance(
    pair: Pair, samples: Sequence[Sample], rule: Rule, tree: Tree, *, heard: Heard = lambda tokens: None
) -> Figures:
    """Run samples under a rule; the draft has a tree of this shape ready at every step."""
    speculation = SpeculationOptions(
        REMOTE, forced=True, max_candidates=tree.candidates, max_depth=tree.depth, max_branches=tree.branches
    )
    asked = [replace(sample, rule=rule, speculation=speculation) for sample in samples]
    return run(pair, Layout(remote=True, step_seconds=LONG_STEP), Load(asked, streams=1), heard=heard)[0]


def speed(pair: Pair, way: Way, *loads: Load, heard: Heard = lambda tokens: None) -> list[Figures]:
    """Run loads in sequence, served this way."""

    def asked(load: Load) -> Load:
        return replace(load, samples=[replace(sample, speculation=way.speculation) for sample in load.samples])

    return run(pair, way.layout, *map(asked, loads), heard=heard)
