"""Measure the cost of a long prompt to other streams: their time between tokens, with and without it.

    python -m bench chunking --dtype bfloat16 --rounds 8

Eight streams run. In every other round, a prompt of 1,500 tokens arrives as well, with a short one right behind it. It
prints the median and p99 of the time between two pieces of a stream, and the time to the first token of both prompts.
The model is the demo target configured with twice its context. That is beyond its training, so the text is poor, but
the cost is right.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bench.arguments import limit, parser_of
from bench.serving.answers import Answer
from bench.systems.altered import copied
from demo.prompts import held_out
from specdec.client import AsyncClient
from specdec.local import DEMO, Stack

STREAMS = 8
STREAM_TOKENS = 400
LONG, SHORT = 1500, 16
CONTEXT = 2048


@dataclass
class Seen:
    """Measured seconds over all rounds."""

    gaps: list[float] = field(default_factory=list)
    first_of_long: list[float] = field(default_factory=list)
    first_of_short: list[float] = field(default_factory=list)


async def ask(client: AsyncClient, prompt: list[int], tokens: int) -> Answer:
    return await Answer().record(
        client.generate(
            tokens=prompt, max_tokens=tokens, temperature=0.8, seed=1, ignore_end_token=True, speculation="off"
        )
    )


async def one_round(client: AsyncClient, seen: Seen, number: int, disturbed: bool) -> None:
    prompts = held_out(STREAMS, tokens=32, seed=number)
    long = [token for text in held_out(LONG // 100, tokens=100, seed=100 + number) for token in text]
    short = held_out(1, tokens=SHORT, seed=number)[0]
    running = [asyncio.create_task(ask(client, p, STREAM_TOKENS)) for p in prompts]
    await asyncio.sleep(0.5)  # until all of them decode
    begin, end = time.perf_counter(), None
    if disturbed:
        arriving = asyncio.create_task(ask(client, long, 2))
        await asyncio.sleep(0.02)
        behind = asyncio.create_task(ask(client, short, 2))
        for task, firsts in ((behind, seen.first_of_short), (arriving, seen.first_of_long)):
            firsts.append((await task).first)
        end = time.perf_counter()
    for answer in await asyncio.gather(*running):
        inside = [t for t in answer.pieces if t >= begin and (end is None or t <= end)]
        seen.gaps += np.diff(inside).tolist()


async def measure(address: str, rounds: int) -> tuple[Seen, Seen]:
    """Return the measurements (idle, disturbed)."""
    idle, disturbed = Seen(), Seen()
    async with AsyncClient(address, timeout=120) as client:
        await one_round(client, Seen(), 999, True)  # warm
        for number in range(rounds):
            await one_round(client, idle, 2 * number, False)
            await one_round(client, disturbed, 2 * number + 1, True)
    return idle, disturbed


def main(given: Sequence[str]) -> None:
    parser = parser_of("chunking", __doc__)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--rounds", type=int, default=6)
    args = parser.parse_args(given)
    limit(parser, args, 1, "rounds")
    with tempfile.TemporaryDirectory() as folder:
        target = copied(DEMO / "target", Path(folder, "target"), max_position_embeddings=CONTEXT)
        # Every prompt is new: otherwise prefix caching would leave nothing to compute.
        with Stack.start(target, "none", dtype=args.dtype) as stack:
            idle, disturbed = asyncio.run(measure(stack.address, args.rounds))
    rows = [("idle", idle.gaps), (f"while {LONG} tokens arrive", disturbed.gaps)]
    for name, gaps in rows:
        p50, p99 = (1e3 * float(np.percentile(gaps, q)) for q in (50, 99))
        print(f"{name:28} {len(gaps):6} gaps, median {p50:6.1f} ms, p99 {p99:6.1f} ms")
    ratio = float(np.percentile(disturbed.gaps, 99) / np.percentile(idle.gaps, 99))
    print(f"p99 over idle p99: {ratio:.2f}")
    for name, firsts in (("long", disturbed.first_of_long), ("short, behind it", disturbed.first_of_short)):
        print(f"first token of the {name} prompt: median {1e3 * float(np.median(firsts)):.0f} ms")
