"""Scenarios as data: the clients' requests, concurrent events, and the outcome.

Events happen in order, each when its condition holds. Every request is sent at least once, and the requests are
repeated from the beginning until the events are over.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from specdec.client import AsyncClient, Chunk
from testing.delay_proxy import DelayProxy
from tests.faults.asks import Ask
from tests.faults.cluster import Cluster
from tests.faults.history import Record, record, wrong
from tests.faults.pods import Pod
from tests.faults.rollout import Rollout
from tests.margins import Oracle

MAX_STARTING = 2
"""Maximum pods that are starting when another is killed at random."""


@dataclass(frozen=True)
class After:
    """`seconds` after the previous event."""

    seconds: float

    def __call__(self, run: Run) -> bool:
        return run.seconds_since_event >= self.seconds


@dataclass(frozen=True)
class Borne:
    """`seconds` after the previous event, while at most MAX_STARTING pods are starting. On a slow or busy machine, pods
    that are killed faster than they can start would leave none to serve."""

    seconds: float

    def __call__(self, run: Run) -> bool:
        starting = sum(pod.running and not pod.ready for pod in run.cluster.pods.values())
        return run.seconds_since_event >= self.seconds and starting <= MAX_STARTING


@dataclass(frozen=True)
class At:
    """`seconds` after the beginning."""

    seconds: float

    def __call__(self, run: Run) -> bool:
        return time.monotonic() - run.began >= self.seconds


@dataclass(frozen=True)
class Received:
    """The clients have received `tokens` tokens since the previous event."""

    tokens: int

    def __call__(self, run: Run) -> bool:
        return run.tokens_since_event >= self.tokens


@dataclass(frozen=True)
class Ended:
    """The pod's process has ended."""

    pod: str

    def __call__(self, run: Run) -> bool:
        return not run.pod(self.pod).running


@dataclass(frozen=True)
class Ready:
    """The pod takes calls."""

    pod: str

    def __call__(self, run: Run) -> bool:
        return run.pod(self.pod).ready


Condition = After | Borne | At | Received | Ended | Ready


@dataclass(frozen=True)
class Event:
    """Call the method `do` of `whom` when the condition holds: of a pod (start, kill, terminate, freeze, thaw), of a
    network (stall, resume, reset, ...), of the cluster's security (renew) or of a rollout. Without `do`, just wait for
    the condition."""

    when: Condition
    do: str = ""
    whom: str = ""


def kills(seed: int, pods: Sequence[str], seconds: float, gap: tuple[float, float]) -> Iterator[Event]:
    """Yield kills of random pods, each restarted immediately, as by a container runtime."""
    generator = random.Random(seed)
    while seconds > 0:
        pause = generator.uniform(*gap)
        pod = generator.choice(pods)
        seconds -= pause
        yield Event(Borne(pause), "kill", pod)
        yield Event(Ended(pod), "start", pod)


def rolling_restart(pods: Sequence[str], pause: float) -> Iterator[Event]:
    """Yield events that drain and restart pods one after the other."""
    for pod in pods:
        yield Event(After(pause), "terminate", pod)
        yield Event(Ended(pod), "start", pod)
        yield Event(Ready(pod))


class Run:
    """A scenario in progress, and its outcome."""

    def __init__(self, cluster: Cluster, **others: DelayProxy | Rollout) -> None:
        self.cluster = cluster
        self.records: list[tuple[int, Record]] = []  # with the index of the request
        self.timeline: list[tuple[float, Event]] = []
        self.tokens = 0
        self._things: dict[str, object] = {**cluster.pods, **cluster.spares, **others, "security": cluster.security}
        self.began = self._event_time = time.monotonic()
        self._event_tokens = 0

    def pod(self, name: str) -> Pod:
        found = self._things[name]
        assert isinstance(found, Pod)
        return found

    @property
    def seconds_since_event(self) -> float:
        return time.monotonic() - self._event_time

    @property
    def tokens_since_event(self) -> int:
        return self.tokens - self._event_tokens

    @property
    def longest_pause(self) -> float:
        """Longest silence in seconds within any stream, after its first piece."""
        return max((seen.pause[0] for _, seen in self.records), default=0.0)

    @property
    def failover_events(self) -> Counter[str]:
        """Number of moves to another pod, by reason."""
        total: Counter[str] = Counter()
        for _, seen in self.records:
            if seen.finish is not None:
                total.update(seen.finish.speculation.failover_events)
        return total

    def speed(self, begin: float, end: float) -> tuple[float, float]:
        """Return (tokens per second, tokens per target step) of arrivals between two times."""
        arrived = [
            chunk
            for _, seen in self.records
            for at, chunk in zip(seen.times, seen.chunks, strict=True)
            if begin <= at < end
        ]
        tokens = sum(len(chunk.tokens) for chunk in arrived)
        return tokens / (end - begin), tokens / max(1, sum(chunk.steps for chunk in arrived))

    def seen(self, chunk: Chunk) -> None:
        self.tokens += len(chunk.tokens)

    async def play(self, client: AsyncClient, asks: Sequence[Ask], events: Iterable[Event], at_once: int) -> Self:
        """Run until each request was sent, no event is left, and all streams are over."""
        numbers = itertools.count()

        async def ask_on() -> None:
            while (number := next(numbers)) < len(asks) or not playing.done():
                ask = asks[number % len(asks)]
                self.records.append((number % len(asks), await record(client, ask, self.seen)))

        async with asyncio.TaskGroup() as group:
            playing = group.create_task(self._act(events))
            for _ in range(at_once):
                group.create_task(ask_on())
        return self

    async def play_open(self, client: AsyncClient, asks: Sequence[Ask], events: Iterable[Event], rate: float) -> Self:
        """Send requests at Poisson times at `rate` per second, regardless of earlier ones, until no event is left and
        all streams are over."""
        dice = random.Random(17)

        async def ask_one(number: int) -> None:
            self.records.append((number, await record(client, asks[number], self.seen)))

        async with asyncio.TaskGroup() as group:
            playing, at = group.create_task(self._act(events)), self.began
            for number in itertools.cycle(range(len(asks))):
                at += dice.expovariate(rate)
                await asyncio.sleep(at - time.monotonic())
                if playing.done():
                    break
                group.create_task(ask_one(number))
        return self

    async def _act(self, events: Iterable[Event]) -> None:
        for event in events:
            while not event.when(self):
                await asyncio.sleep(0.005)
            self._event_time, self._event_tokens = time.monotonic(), self.tokens
            if event.do:
                getattr(self._things[event.whom], event.do)()
                self.timeline.append((self._event_time, event))

    def faults(self, wants: Mapping[int, Record], oracle: Oracle) -> list[str]:
        """Return the faults, a line per stream, and pods that ended unexpectedly."""
        found = [
            f"stream {n}, {seen.ask.options}: {fault}"
            for n, seen in self.records
            if (fault := wrong(seen, wants[n], oracle))
        ]
        return found + [f"{name} died:\n{self.pod(name).log_tail()}" for name in self.cluster.died]

    def report(self) -> str:
        """Return a summary in a few lines."""
        done = Counter(event.do for _, event in self.timeline)
        interrupted = sum(bool(r.finish and r.finish.speculation.failover_events) for _, r in self.records)
        lines = [
            f"{len(self.records)} streams, {self.tokens} tokens in {time.monotonic() - self.began:.0f} s; "
            f"events: {dict(done)}; {interrupted} streams interrupted: {dict(self.failover_events)}"
        ]
        waits = max((seen.wait, seen.began) for _, seen in self.records)
        lines.append(f"longest wait for a first piece: {waits[0]:.2f} s from {waits[1] - self.began:.1f} s")
        for length, start in sorted((seen.pause for _, seen in self.records), reverse=True)[:3]:
            about = [
                f"{event.do} {event.whom} at {at - start:+.2f} s"
                for at, event in self.timeline
                if -2.0 < at - start < length
            ]
            lines.append(f"pause of {length:.2f} s from {start - self.began:.1f} s; {', '.join(about)}")
        lines.append(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
        return "\n".join(lines)
