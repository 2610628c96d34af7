"""Parts of a sample in order: reasoning, text and tool calls, for APIs whose answers consist of blocks."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from specdec.client import Chunk, Finish, Logprobs
from specdec.openai_api.answers import REASONS, Calls
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
    logprobs: list[Logprobs] = []
    begun = False
    async with aclosing(chunks):
        async for chunk in chunks:
            if not begun:
                begun = True
                yield BeginPart(0 if chunk.resolved is None else chunk.resolved.prompt_tokens)
            if chunk.reasoning and reasoning:
                yield ReasoningPart(chunk.reasoning)
            logprobs += of_text(chunk, with_end=with_end)
            for item in [chunk.text] if calls is None else calls.items(chunk):
                if not isinstance(item, str):
                    yield CallPart(item["id"], item["function"]["name"], item["function"]["arguments"])
                    logprobs = []
                elif item or (logprobs and calls is None):
                    yield TextPart(item, tuple(logprobs))
                    logprobs = []
            if chunk.finish is not None:
                yield EndPart(chunk.finish)
