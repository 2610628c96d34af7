"""The cost of delay between services: its round trips, and a target's steps as seen by clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

from bench.network.delay import System, parsed
from specdec.client import AsyncClient


def test_no_delay_is_always_measured() -> None:
    """Rates are divided by those without delay."""
    assert parsed(["--round-trips", "0.5,0.3"]).round_trips == [0.0, 0.3, 0.5]
    assert parsed(["--round-trips", "0,0.3"]).round_trips == [0.0, 0.3]


class FakeClient:
    """The second stream begins only after the first one's last piece. A first piece's step takes 9 s, others 1 s."""

    def __init__(self) -> None:
        self._over = asyncio.Event()

    @asynccontextmanager
    async def generate(self, **options: Any) -> AsyncIterator[AsyncIterator[Any]]:
        yield self._chunks(options["seed"])

    async def _chunks(self, stream: int) -> AsyncIterator[Any]:
        if stream:
            await self._over.wait()
        for step_seconds in (9.0, 1.0, 1.0):
            yield SimpleNamespace(tokens=[5], step_seconds=step_seconds, finish=None)
        self._over.set()


async def test_no_run_finds_the_prompts_of_another() -> None:
    client, salts = FakeClient(), []
    generate = client.generate

    def noted(**options: Any) -> Any:
        salts.append(options["cache_salt"])
        return generate(**options)

    client.generate = noted  # type: ignore[method-assign]
    system = System("ordinary", cast("AsyncClient", client), {})
    for _ in range(2):
        await system.run([[1]], tokens=3)
    assert len(set(salts)) == 2


async def test_the_first_step_of_each_stream_is_dropped() -> None:
    """It computes the prompt."""
    run = await System("ordinary", cast("AsyncClient", FakeClient()), {}).run([[1], [2]], tokens=3)
    assert run.steps == [1.0] * 4
