"""Requests in an open loop: they arrive regardless of earlier ones, like those of independent users."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator

from bench.serving.answers import Answer
from demo.prompts import held_out
from specdec.client import AsyncClient, SpecdecError

PROMPT_TOKENS = 64
TOKENS = 64
"""Tokens of a prompt and of a text."""

MEMORY = 4096
VERIFIER = ("--kv-tokens", str(MEMORY), "--threads", "1")
"""Options of the verifier: memory for some thirty texts. One core computes; the other is for everything else."""


async def ask(client: AsyncClient, prompt: list[int], tenant: str, timeout: float | None) -> Answer:
    answer = Answer()
    try:
        async with client.generate(
            tokens=prompt, max_tokens=TOKENS, ignore_end_token=True, tenant=tenant, speculation="off", timeout=timeout
        ) as chunks:
            async for chunk in chunks:
                answer.piece(len(chunk.tokens))
    except SpecdecError as error:
        answer.finish(type(error).__name__, str(error))
    else:
        answer.finish()
    return answer


async def at_poisson_times(rate: float, seconds: float, seed: int) -> AsyncIterator[float]:
    """Yield at Poisson times, `rate` a second, for `seconds`; each value is the due time in seconds."""
    dice, begin, due = random.Random(seed), time.perf_counter(), 0.0
    while (due := due + dice.expovariate(rate)) <= seconds:
        await asyncio.sleep(max(0.0, begin + due - time.perf_counter()))
        yield due


async def arrivals(
    client: AsyncClient, rate: float, seconds: float, *, seed: int, tenant: str = "", timeout: float | None = None
) -> list[Answer]:
    """Send requests at Poisson times at `rate` per second for `seconds`; return all answers."""
    prompts = iter(held_out(max(1, int(2 * rate * seconds)), tokens=PROMPT_TOKENS, seed=seed))
    asked = []
    async for _ in at_poisson_times(rate, seconds, seed):
        if (prompt := next(prompts, None)) is None:
            break
        asked.append(asyncio.create_task(ask(client, prompt, tenant, timeout)))
    return await asyncio.gather(*asked)


async def capacity(client: AsyncClient, seconds: float, at_once: int = 48) -> float:
    """Return the requests a second completed in a closed loop with `at_once` in flight. It runs for twice `seconds` and
    counts only in the second half, since at the beginning no request is near its end."""
    prompts, done = iter(held_out(4000, tokens=PROMPT_TOKENS, seed=7)), 0
    begin = time.perf_counter() + seconds
    end = begin + seconds

    async def ask_on() -> None:
        nonlocal done
        while time.perf_counter() < end:
            answer = await ask(client, next(prompts), "", None)
            done += answer.error is None and begin <= time.perf_counter() < end

    await asyncio.gather(*(ask_on() for _ in range(at_once)))
    return done / seconds
