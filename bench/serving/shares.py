"""Measure the latency of a text under another tenant's load, by kind of load.

    python -m bench shares [--rounds 3 --texts 6 --kinds plain samples]

Two tenants have equal weight. The quiet one runs text after text, in turns alone and while the other keeps `REQUESTS`
requests in flight from a separate process. The figure is the ratio of the medians: with fair sharing it is at most 2.
The kind `cancels` opens and cancels requests instead, some 490 a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import time
from collections import Counter
from collections.abc import Sequence
from itertools import count
from multiprocessing.synchronize import Event
from operator import attrgetter
from statistics import median
from typing import Any

from bench.arguments import limit, parser_of
from bench.serving.answers import Answer
from demo.prompts import held_out
from specdec.client import AsyncClient, SpecdecError
from specdec.local import Stack

QUIET, OTHER = "quiet", "other"

PROMPT_TOKENS = 64
TOKENS = 48
"""Tokens of a prompt and of a text."""

REQUESTS = 16
"""Requests of the other tenant in flight at any time."""

CANCELS_A_SECOND = 490

GRAMMAR = r"([a-zA-Z0-9 ,.;:!?'-]{1,40}\n)*"

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "samples": {"n": 15, "temperature": 1.0},  # a verifier has 256 sessions
    "lookahead": {"lookahead": (15, 5, 15)},
    "drafts": {"speculation": "always"},
    "grammar": {"regex": GRAMMAR, "temperature": 1.0},
    "cancels": {},
}
"""Options of the other tenant's requests."""


async def ask(client: AsyncClient, prompt: list[int]) -> Answer:
    """Request a text of the quiet tenant."""
    return await Answer().record(
        client.generate(tokens=prompt, max_tokens=TOKENS, ignore_end_token=True, tenant=QUIET, speculation="off")
    )


def crowd(address: str, kind: str, seed: int, running: Event, over: Event) -> None:
    """Keep the other tenant's requests in flight until `over` is set; runs in a separate process."""
    outcomes: Counter[str] = Counter()

    async def texts(client: AsyncClient, prompts: list[list[int]]) -> None:
        for place in count():
            try:
                async with client.generate(
                    tokens=prompts[place % len(prompts)], max_tokens=256, tenant=OTHER, **KINDS[kind]
                ) as chunks:
                    async for _ in chunks:
                        running.set()
                        if over.is_set():
                            return
                outcomes["complete"] += 1
            except SpecdecError as error:
                outcomes[type(error).__name__] += 1
                await asyncio.sleep(0.02)
            if over.is_set():
                return

    async def cancelled(client: AsyncClient, prompt: list[int]) -> None:
        async def one() -> None:
            async with client.generate(tokens=prompt, max_tokens=256, tenant=OTHER) as chunks:
                async for _ in chunks:
                    return

        task = asyncio.create_task(one())
        await asyncio.wait({task}, timeout=0.01)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, SpecdecError):
            await task
        outcomes["cancelled"] += 1

    async def run() -> None:
        async with AsyncClient(address) as client:
            prompts = held_out(64, tokens=PROMPT_TOKENS, seed=seed)
            if kind != "cancels":
                own = [prompts[4 * index : 4 * index + 4] for index in range(REQUESTS)]
                await asyncio.gather(*(texts(client, some) for some in own))
                return
            tasks: set[asyncio.Task[None]] = set()
            begin = time.perf_counter()
            for place in count():
                if over.is_set():
                    break
                await asyncio.sleep(max(0.0, begin + place / CANCELS_A_SECOND - time.perf_counter()))
                if len(tasks) < 256:
                    tasks.add(task := asyncio.create_task(cancelled(client, prompts[place % len(prompts)])))
                    task.add_done_callback(tasks.discard)
                if place == 50:
                    running.set()
            await asyncio.gather(*tasks)

    begin = time.perf_counter()
    asyncio.run(run())
    done = {name: round(number / (time.perf_counter() - begin), 1) for name, number in outcomes.items()}
    print(f"  {kind}: the other tenant, a second: {done}", flush=True)


async def measure(address: str, kinds: Sequence[str], rounds: int, texts: int) -> None:
    spawn = multiprocessing.get_context("spawn")
    async with AsyncClient(address) as client:
        prompts = iter(held_out(len(kinds) * rounds * texts * 2 + texts, tokens=PROMPT_TOKENS, seed=7))
        for _ in range(texts):
            await ask(client, next(prompts))
        for kind in kinds:
            alone: list[Answer] = []
            beside: list[Answer] = []
            for number in range(rounds):
                alone += [await ask(client, next(prompts)) for _ in range(texts)]
                running, over = spawn.Event(), spawn.Event()
                process = spawn.Process(target=crowd, args=(address, kind, 100 + number, running, over))
                process.start()
                try:
                    if not await asyncio.to_thread(running.wait, 60):
                        raise SystemExit(f"{kind}: the other tenant got no answer within 60 s")
                    await asyncio.sleep(1.0)
                    beside += [await ask(client, next(prompts)) for _ in range(texts)]
                finally:
                    over.set()
                    await asyncio.to_thread(process.join)
                if process.exitcode:
                    raise SystemExit(f"{kind}: the other tenant's process failed with exit status {process.exitcode}")
            told = []
            for name, of in (("first token", attrgetter("first")), ("text", attrgetter("seconds"))):
                one, other = median(map(of, alone)), median(map(of, beside))
                told.append(f"{name} {other / one:5.1f} times ({1e3 * one:.0f} -> {1e3 * other:.0f} ms)")
            print(f"{kind:10} {'; '.join(told)}; longest first token {max(a.first for a in beside):.2f} s", flush=True)


def main(given: Sequence[str]) -> None:
    parser = parser_of("shares", __doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--texts", type=int, default=6)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    args = parser.parse_args(given)
    limit(parser, args, 1, "rounds", "texts")
    with Stack.start(dtype="float32") as stack:
        asyncio.run(measure(stack.address, args.kinds, args.rounds, args.texts))
