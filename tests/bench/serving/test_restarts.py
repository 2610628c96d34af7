"""Kills under load: the table is kept if one of them fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from bench.serving.restarts import Seen, System, measure
from specdec.local import LocalError


class Fake:
    """Servers that answer every text with two pieces."""

    def __init__(self, kills: bool, serves: bool) -> None:
        self._kills = kills
        self._serves = serves

    async def ask(self, seen: Seen) -> None:
        seen.piece("a", 1)
        await asyncio.sleep(0.01)
        seen.piece("b", 1)

    def kill(self, turn: int) -> None:
        if not self._kills:
            raise LocalError("a draft did not restart")

    async def ready(self) -> None:
        if not self._serves:
            raise LocalError("a verifier is not ready")


@pytest.mark.parametrize(
    ("kills", "serves", "problems"),
    [
        (True, True, []),
        (False, True, ["fake: a draft did not restart"]),
        (True, False, ["fake: a verifier is not ready"]),
    ],
)
async def test_failed_restarts_are_told_beside_the_table(kills: bool, serves: bool, problems: list[str]) -> None:
    @asynccontextmanager
    async def fake() -> AsyncIterator[System]:
        yield Fake(kills, serves)

    table, told = await measure({"fake": fake}, seconds=0.3, every=0.02)
    assert told == problems
    assert [line.split(" | ")[0] for line in table.splitlines()[2:]] == ["| fake, calm", "| fake, killed"]
