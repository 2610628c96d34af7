"""Measure the duration of a drain, and its effects on clients.

    python -m bench drain [--rounds 3 --streams 8]

Two verifiers, two drafts and two orchestrators serve texts continuously. In turns, one pod of each role gets a SIGTERM
and is started again. It reports the seconds until the pod has ended, the longest silence in a running stream (also
without a drain, for comparison), and failed requests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count, pairwise

from bench import markdown
from bench.arguments import parser_of
from demo.prompts import held_out
from specdec.client import AsyncClient, SpecdecError
from specdec.local import DEMO
from specdec.local.child import Child, stop

TOKENS = 400
"""Tokens of a text: enough to run for seconds."""

START_SECONDS = 120.0
CALM_SECONDS = 5.0
"""Seconds without a drain before each one."""

COLUMNS = ("role", "round", "seconds to end", "longest silence (s)", "without a drain (s)", "failed")

MODULES = {"verifier": "verifier_service", "draft": "draft_service", "orchestrator": "orchestrator"}


@dataclass
class Pod:
    """A service that is ended and restarted at the same address."""

    child: Child
    address: str = ""

    def until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not (found := self.child.ready_at()):
            if self.child.ending() or time.monotonic() > deadline:
                raise SystemExit(f"{self.child.name} does not start: {self.child.ending() or 'too slow'}")
            time.sleep(0.05)
        self.address = found


@dataclass
class Streams:
    """The clients' view: arrival times of each text's pieces, and the number of failed requests."""

    times: list[list[float]] = field(default_factory=list)
    failed: int = 0

    def longest_silence(self, begin: float, end: float) -> float:
        """Return the longest silence of a running text within an interval."""
        gaps = [
            min(late, end) - max(early, begin)
            for times in self.times
            for early, late in pairwise(times)
            if late > begin and early < end
        ]
        return max(gaps, default=0.0)


@contextmanager
def deployment() -> Iterator[dict[str, list[Pod]]]:
    """Run two pods of each role; yield them by role."""
    pods: dict[str, list[Pod]] = {}

    def start(role: str, *options: str) -> None:
        usual = ("--port", "0", "--log-level", "warning", "--stop-with-stdin")
        pods[role] = [Pod(Child.start(role, "-m", MODULES[role], *usual, *options)) for _ in range(2)]
        for pod in pods[role]:
            pod.until_ready()

    try:
        start(
            "verifier", "--model", str(DEMO / "target"), "--threads", "1", "--kv-tokens", "32768", "--dtype", "float32"
        )
        start("draft", "--model", str(DEMO / "draft"), "--threads", "1", "--kv-tokens", "32768")
        peers = [word for role in ("verifier", "draft") for pod in pods[role] for word in (f"--{role}", pod.address)]
        start("orchestrator", "--model", str(DEMO / "target"), *peers)
        yield pods
    finally:
        stop([pod.child for each in pods.values() for pod in each])


async def ask_on(client: AsyncClient, seen: Streams, numbers: count[int], prompts: list[list[int]]) -> None:
    """Request one text after the other."""
    while True:
        number = next(numbers)
        times: list[float] = []
        seen.times.append(times)
        try:
            async with client.generate(
                tokens=prompts[number % len(prompts)],
                max_tokens=TOKENS,
                temperature=0.8,
                seed=number,
                ignore_end_token=True,
            ) as stream:
                async for _ in stream:
                    times.append(time.monotonic())  # noqa: PERF401 - what is there so far is looked at meanwhile
        except SpecdecError:
            seen.failed += 1


async def measure(pods: dict[str, list[Pod]], rounds: int, streams: int) -> None:
    seen, numbers, prompts = Streams(), count(), held_out(64, tokens=64, seed=5)
    fronts = [pod.address for pod in pods["orchestrator"]]
    async with AsyncClient(fronts, timeout=120, max_retries=10) as client:
        asking = [asyncio.create_task(ask_on(client, seen, numbers, prompts)) for _ in range(streams)]
        await asyncio.sleep(CALM_SECONDS)
        print(markdown.head(COLUMNS))
        for number in range(rounds):
            for role, both in pods.items():
                pod, failed = both[number % 2], seen.failed
                calm = time.monotonic()
                await asyncio.sleep(CALM_SECONDS)
                begin = time.monotonic()
                pod.child.process.terminate()
                await asyncio.to_thread(pod.child.process.wait, START_SECONDS)
                ended = time.monotonic()
                await asyncio.sleep(1.0)  # its texts continue elsewhere
                silence = seen.longest_silence(begin, time.monotonic())
                seconds = (ended - begin, silence, seen.longest_silence(calm, begin))
                cells = [role, number + 1, *(f"{each:.2f}" for each in seconds), seen.failed - failed]
                print(markdown.row(cells), flush=True)
                pod.child = pod.child.again(pod.address)
                await asyncio.to_thread(pod.until_ready)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


def main(given: Sequence[str]) -> None:
    parser = parser_of("drain", __doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=8)
    args = parser.parse_args(given)
    with deployment() as pods:
        asyncio.run(measure(pods, args.rounds, args.streams))
