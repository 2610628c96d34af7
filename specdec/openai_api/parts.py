"""Parts of a sample in order: reasoning, text and tool calls, for APIs whose answers consist of blocks."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from specdec.client import Chunk, Finish, Logprobs
from specdec.openai_api.answers import REASONS, Calls
from specdec.openai_api.json_text import Json
from specdec.openai_api.logprobs import of_text


@dataclass(frozen=True)
class BeginPart:
    """The beginning of the sample."""

    prompt_tokens: int  # 0 from an orchestrator that does not count them before the end


@dataclass(frozen=True)
class ReasoningPart:
    """A piece of the reasoning."""

    text: str


@dataclass(frozen=True)
class TextPart:
    """A piece of the text, with the logprobs of its tokens if requested."""

    text: str
    logprobs: tuple[Logprobs, ...] = ()


@dataclass(frozen=True)
class CallPart:
    """A tool call."""

    id: str
    name: str
    arguments: str  # JSON; only the start of it if the call was cut off

    @property
    def input(self) -> dict[str, Any] | None:
        """The arguments as an object; None if they are cut off or not an object."""
        try:
            found = json.loads(self.arguments)
        except ValueError:
            return None
        return found if isinstance(found, dict) else None


@dataclass(frozen=True)
class EndPart:
    """The end of the sample."""

    finish: Finish

    @property
    def cut_off(self) -> bool:
        """True if the sample ended at a limit on its length."""
        return REASONS.get(self.finish.reason) == "length"


Part = BeginPart | ReasoningPart | TextPart | CallPart | EndPart


async def parts_of(
    chunks: AsyncGenerator[Chunk, None], calls: Calls | None, *, reasoning: bool, with_end: bool
) -> AsyncGenerator[Part, None]:
    """Yield the parts of a sample in order. `calls` reads its tool calls; None if it cannot have any. `reasoning`:
    include the reasoning; `with_end`: as in `of_text`. The logprobs of text that may still become a call are held back
    with the text."""
    logprobs: list[Logprobs] = []  # of tokens whose text is held back
    begun = behind_call = False
    async with aclosing(chunks):
        async for chunk in chunks:
            if not begun:
                begun = True
                yield BeginPart(0 if chunk.resolved is None else chunk.resolved.prompt_tokens)
            if chunk.reasoning and reasoning:
                yield ReasoningPart(chunk.reasoning)
            text, of_its_tokens = "", list[Logprobs]()
            for found, items in _items(chunk, calls, with_end=with_end):
                logprobs += found
                for item in items:
                    if isinstance(item, str):
                        text, of_its_tokens, logprobs = text + item, of_its_tokens + logprobs, []
                        behind_call = behind_call and not item
                        continue
                    if text:
                        yield TextPart(text, tuple(of_its_tokens))
                        text, of_its_tokens = "", []
                    yield CallPart(item["id"], item["function"]["name"], item["function"]["arguments"])
                    logprobs, behind_call = [], True
            if chunk.finish is not None and not behind_call:
                of_its_tokens += logprobs  # of tokens without text, such as an end token
            if text or of_its_tokens:
                yield TextPart(text, tuple(of_its_tokens))
            if chunk.finish is not None:
                yield EndPart(chunk.finish)


def _items(
    chunk: Chunk, calls: Calls | None, *, with_end: bool
) -> Iterator[tuple[Sequence[Logprobs], Iterable[str | Json]]]:
    """Yield the logprobs of tokens, each with the text and the calls that the tokens complete: token by token, so that
    the result does not depend on chunks."""
    found = of_text(chunk, with_end=with_end)
    if calls is None:
        yield found, [chunk.text]
        return
    texts = chunk.token_texts[chunk.reasoning_tokens :]
    if found and len(texts) >= len(found):
        for place, text in enumerate(texts):
            yield found[place : place + 1], calls.push(text)
    else:  # an earlier version of the orchestrator sends no texts of tokens
        yield found, calls.push(chunk.text)
    yield [], calls.finish(chunk.finish)
