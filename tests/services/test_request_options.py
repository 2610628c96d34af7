"""Options of vLLM's requests through all services."""

from __future__ import annotations

from typing import Any

from specdec.client import AsyncClient
from tests.services.conftest import Directories
from tests.stack import stack

PROMPT = list(range(60, 70))
ALLOWED = list(range(50, 62))


async def test_what_is_not_allowed_is_neither_drafted_nor_chosen(directories: Directories) -> None:
    options: dict[str, Any] = {
        "tokens": PROMPT,
        "max_tokens": 24,
        "temperature": 1.0,
        "seed": 3,
        "ignore_end_token": True,
    }
    options |= {"allowed_tokens": ALLOWED, "return_prompt_token_ids": True}
    async with stack(directories.target, directories.near) as services, AsyncClient(services.address) as client:
        drafted = await client.complete(**options)
        plain = await client.complete(**options, speculation="off")
        tokens = drafted.completions[0].tokens
        assert set(tokens) <= set(ALLOWED)
        assert tokens == plain.completions[0].tokens
        assert drafted.prompt_token_ids == PROMPT
        assert drafted.resolved.prompt_tokens == len(PROMPT)
        stop = drafted.text[5:7]
        whole = await client.complete(**options, stop=stop, include_stop=True)
        assert whole.text == drafted.text[: drafted.text.index(stop) + len(stop)]
        async with client.generate(**options) as stream:
            first, *others = [chunk.prompt_token_ids async for chunk in stream]
    assert first == PROMPT
    assert set(others) == {None}
