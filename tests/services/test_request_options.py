"""Options of vLLM's requests through all services."""

from __future__ import annotations

from typing import Any

from specdec.client import AsyncClient
from specdec.engine.model_directory import ModelDirectory
from specdec.text.tokenizer import Tokenizer
from tests.services.conftest import Directories
from tests.stack import stack

PROMPT = list(range(60, 70))
ALLOWED = list(range(50, 62))
WARM: dict[str, Any] = {"max_tokens": 24, "temperature": 1.0, "seed": 3, "ignore_end_token": True}


async def test_what_is_not_allowed_is_neither_drafted_nor_chosen(directories: Directories) -> None:
    options = {"tokens": PROMPT, **WARM, "allowed_tokens": ALLOWED, "return_prompt_token_ids": True}
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


async def test_a_bad_word_of_several_tokens_is_neither_drafted_nor_chosen(directories: Directories) -> None:
    """Not even if the bad word would begin in the prompt."""
    tokenizer = Tokenizer(ModelDirectory(directories.target))
    async with stack(directories.target, directories.near) as services, AsyncClient(services.address) as client:

        async def both(**options: Any) -> list[int]:
            """Return the tokens of a text, which are the same with and without drafts."""
            drafted = await client.complete(tokens=PROMPT, **WARM, **options)
            plain = await client.complete(tokens=PROMPT, **WARM, **options, speculation="off")
            assert drafted.completions[0].tokens == plain.completions[0].tokens
            return [int(token) for token in drafted.completions[0].tokens]

        letters = [token for token in range(3, 320) if tokenizer.decode([token]).isalpha()]
        free = await both(allowed_tokens=letters)
        whole = [PROMPT[-1], *free]
        # Parts of the text that the tokenizer encodes as the same tokens: one begins in the prompt, one further on.
        parts = [whole[at : at + 2 + (at > 0)] for at in (0, *range(4, 20))]
        first, inside, *_ = [part for part in parts if tokenizer.encode(tokenizer.decode(part), special=False) == part]
        assert first == whole[:2]
        words = [tokenizer.decode(first), tokenizer.decode(inside)]
        kept = await both(allowed_tokens=letters, bad_words=words)
    found = [PROMPT[-1], *kept]
    assert kept[0] != free[0]
    assert not any(found[at : at + 2] == first or found[at : at + 3] == inside for at in range(len(found)))
