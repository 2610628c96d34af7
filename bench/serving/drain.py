"""Measure the duration of a drain, and its effects on clients.

    python -m bench drain [--rounds 3 --streams 8]

Two verifiers, two drafts and two orchestrators serve texts continuously. In turns, one pod of each role gets a SIGTERM
and is started again. It reports the seconds until the pod has ended, the longest silence in a running stream (also
without a drain, for comparison), and failed requests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise

from bench import markdown
from bench.arguments import limit, parser_of
from bench.serving.pods import START_SECONDS, Pod, running
from demo.prompts import held_out
from specdec.client import AsyncClient, SpecdecError

TOKENS = 400
"""Tokens of a text: enough to run for seconds."""

CALM_SECONDS = 5.0
"""Seconds without a drain before each one."""

COLUMNS = ("role", "round", "seconds to end", "longest silence (s)", "without a drain (s)", "failed")


@dataclass
class Text:
    """Arrival times of a text's pieces."""

    times: list[float] = field(default_factory=list)
    over: bool = False


@dataclass
class Streams:
    """The clients' view: all texts, and the number of failed requests."""

    texts: list[Text] = field(default_factory=list)
    failed: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)  # set with each piece, and at the end of each text

    def longest_silence(self, begin: float, end: float) -> float:
        """Return the longest silence of a text within an interval; a text that runs at `end` is silent until then."""
        gaps = [
            min(late, end) - max(early, begin)
            for text in self.texts
            for early, late in pairwise(text.times if text.over else [*text.times, end])
            if late > begin and early < end
        ]
        return max(gaps, default=0.0)

    async def next_pieces(self, seconds: float) -> None:
        """Wait until each running text has had another piece or is over; TimeoutError after `seconds`."""
        running = [(text, len(text.times)) for text in self.texts if not text.over]
        async with asyncio.timeout(seconds):
            while any(not text.over and len(text.times) == before for text, before in running):
                self.changed.clear()
                await self.changed.wait()


async def ask_on(client: AsyncClient, seen: Streams, numbers: count[int], prompts: list[list[int]]) -> None:
    """Request one text after the other."""
    while True:
        number = next(numbers)
        seen.texts.append(text := Text())
        try:
            async with client.generate(
                tokens=prompts[number % len(prompts)],
                max_tokens=TOKENS,
                temperature=0.8,
                seed=number,
                ignore_end_token=True,
            ) as stream:
                async for _ in stream:
                    text.times.append(time.monotonic())
                    seen.changed.set()
        except SpecdecError:
            seen.failed += 1
        finally:
            text.over = True
            seen.changed.set()


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
                await seen.next_pieces(START_SECONDS)  # its texts continue elsewhere
                silence = seen.longest_silence(begin, time.monotonic())
                seconds = (ended - begin, silence, seen.longest_silence(calm, begin))
                cells = [role, number + 1, *(f"{each:.2f}" for each in seconds), seen.failed - failed]
                print(markdown.row(cells), flush=True)
                pod.restart()
                await asyncio.to_thread(pod.until_ready)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


def main(given: Sequence[str]) -> None:
    parser = parser_of("drain", __doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=8)
    args = parser.parse_args(given)
    limit(parser, args, 1, "rounds", "streams")
    with running() as pods:
        asyncio.run(measure(pods, args.rounds, args.streams))
