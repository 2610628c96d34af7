"""10,000 short streams, a third of them cancelled at random places, leave nothing behind."""

from __future__ import annotations

import asyncio
import gc
import random
from pathlib import Path

import pytest

from tests.models import VOCABULARY
from tests.services.conftest import Directories
from tests.stack import Stack, request_of, stack, until

STREAMS = 10_000
WARM_UP = 2_000
AT_ONCE = 32


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


async def one(services: Stack, generator: random.Random) -> None:
    prompt = [generator.randrange(3, VOCABULARY) for _ in range(generator.randrange(1, 80))]
    sampling = {"temperature": generator.choice((0.0, 1.0)), "seed": generator.randrange(1000)}
    call = services.stub.Generate(request_of(prompt, sampling=sampling, max_tokens=8, ignore_end_token=True))
    reads = generator.randrange(0, 4) if generator.random() < 1 / 3 else None
    if reads is None:
        tokens = 0
        async for response in call:
            tokens += len(response.tokens)
        assert tokens == 8
        return
    for _ in range(reads):
        await call.read()
    call.cancel()


async def many(services: Stack, count: int, generator: random.Random) -> None:
    left = iter(range(count))

    async def worker() -> None:
        for _ in left:
            await one(services, generator)

    await asyncio.gather(*(worker() for _ in range(AT_ONCE)))


@pytest.mark.verify
async def test_short_streams_leak_nothing(directories: Directories) -> None:
    generator = random.Random(5)
    async with stack(directories.target, directories.near, capacity=256 + 64 * 48) as services:
        await many(services, WARM_UP, generator)
        gc.collect()
        before = resident_bytes()
        await many(services, STREAMS - WARM_UP, generator)
        await until(lambda: services.verifier_loop.pool.held == 0 and services.draft_slots_used == 0)
        gc.collect()
        after = resident_bytes()
        load = services.verifier_loop.stats
        assert (load.running, load.waiting) == (0, 0)
    print(
        f"{STREAMS} streams, {load.preemptions} preemptions: {before / 2**20:.0f} MiB before, {after / 2**20:.0f} after"
    )
    assert after < 1.05 * before
