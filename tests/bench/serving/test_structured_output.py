"""Requests whose schemas wait for their trial, more than a tenant may have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from bench.serving.structured_output import figures, requests
from specdec.client import AsyncClient, Overloaded


class Full:
    """Refuses every other call, and answers the rest with 4 tokens in 2 steps."""

    def __init__(self) -> None:
        self.calls = 0

    async def complete(self, **options: Any) -> SimpleNamespace:
        self.calls += 1
        if self.calls % 2:
            raise Overloaded("8 of its grammars are waiting", retry_after=1.0)
        finish = SimpleNamespace(speculation=SimpleNamespace(steps=2))
        return SimpleNamespace(completions=[SimpleNamespace(tokens=[1, 2, 3, 4], finish=finish)])


async def test_refused_requests_are_sent_again() -> None:
    client = Full()
    found = await figures(cast("AsyncClient", client), "schema, plain", requests(0)[:3], streams=2)
    assert (found.tokens_a_step, client.calls) == (2.0, 6)
