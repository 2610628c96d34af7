"""From a request to its answer: the calls of the gRPC API that it takes, whole or piece by piece."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from specdec.client import AsyncClient, AsyncStream, Chunk, Finish, Model, Result, SpecdecError
from specdec.client.endpoint import Metadata
from specdec.client.request_id import REQUEST_ID_CHARACTERS
from specdec.openai_api.answers import ChoiceStream, Frame, Json, choice_of, fingerprint, resolved_of, usage_of
from specdec.openai_api.errors import from_specdec
from specdec.openai_api.requests import Asked
from specdec.serving.interleaved import interleaved

Answer = TypeVar("Answer")

MODELS_SECONDS = 10.0
"""Seconds for which what orchestrators told of their models is not asked again."""

TEMPERATURE = 1.0
"""OpenAI's temperature for a request that names none, where the model's generation_config.json names none either."""


@dataclass(frozen=True)
class Caller:
    """Who asks, and how logs and traces are to call the request."""

    request_id: str
    metadata: Metadata = ()


class Gateway:
    """The way to orchestrators. Errors are ApiErrors."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._models: list[Model] = []
        self._asked_at = float("-inf")

    async def models(self, caller: Caller) -> list[Model]:
        """Return what is served, to a caller who may know it."""
        return await _in_our_words(self._client.models(metadata=caller.metadata))

    async def answer(self, asked: Asked, caller: Caller) -> Json:
        """Generate all samples of all prompts, and return them together."""
        model, calls = await self._calls(asked, caller)
        frame = _frame(asked, model, caller)
        results = await _together([self._client.complete(**call) for call in calls])
        samples = [completion for result in results for completion in result.completions]
        choices = [
            choice_of(sample, index, chat=asked.chat, logprobs=asked.logprobs) for index, sample in enumerate(samples)
        ]
        finishes = [sample.finish for sample in samples]
        own = resolved_of(results[0].seed, results[0].resolved)
        return frame.whole(choices, finishes, own, usage_of(finishes, len(results)))

    async def events(self, asked: Asked, caller: Caller) -> AsyncGenerator[Json, None]:
        """Generate all samples of all prompts, and return the events of their stream. What fails before there is a
        first token is raised here."""
        model, calls = await self._calls(asked, caller)
        frame = _frame(asked, model, caller)
        streams = [_numbered(number, self._client.generate(**call)) for number, call in enumerate(calls)]
        chunks = streams[0] if len(streams) == 1 else interleaved(streams)
        first = await _in_our_words(anext(chunks))
        return _events(asked, frame, first, chunks)

    async def _calls(self, asked: Asked, caller: Caller) -> tuple[str, list[dict[str, Any]]]:
        """Return the name of the model, and the arguments of the client's call for each prompt."""
        model = await self._model(asked.model, caller)
        options = asked.options | {"model": asked.model or None}
        samples_by_itself = model is not None and model.temperature and not options.get("ignore_generation_config")
        if "temperature" not in options and options.get("rule") != "contrastive" and not samples_by_itself:
            options["temperature"] = TEMPERATURE
        ids = [caller.request_id]
        if len(asked.prompts) > 1:
            ids = [_numbered_id(caller.request_id, number) for number in range(len(asked.prompts))]
        calls = [
            prompt | options | {"request_id": request_id, "metadata": caller.metadata}
            for prompt, request_id in zip(asked.prompts, ids, strict=True)
        ]
        return asked.model or ("" if model is None else model.name), calls

    async def _model(self, name: str, caller: Caller) -> Model | None:
        """Return the model that a request names, as orchestrators told it lately; None if they do not know it, which
        they will say themselves."""
        if time.monotonic() - self._asked_at > MODELS_SECONDS:
            self._models = await self.models(caller)
            self._asked_at = time.monotonic()
        return next((each for each in self._models if name in ("", each.name)), None)


def _frame(asked: Asked, model: str, caller: Caller) -> Frame:
    kind = "chatcmpl" if asked.chat else "cmpl"
    return Frame(asked.chat, f"{kind}-{caller.request_id}", int(time.time()), model)


def _numbered_id(request_id: str, number: int) -> str:
    return f"{request_id[: REQUEST_ID_CHARACTERS - 4]}-{number}"


async def _numbered(number: int, stream: AsyncStream) -> AsyncGenerator[tuple[int, Chunk], None]:
    async with stream:
        async for chunk in stream:
            yield number, chunk


async def _events(
    asked: Asked, frame: Frame, first: tuple[int, Chunk], rest: AsyncGenerator[tuple[int, Chunk], None]
) -> AsyncGenerator[Json, None]:
    """Yield the events of a stream whose first chunk has come."""
    usage: Json = {"usage": None} if asked.usage_in_stream else {}
    count = asked.samples * len(asked.prompts)
    choices = [ChoiceStream(index, chat=asked.chat, logprobs=asked.logprobs) for index in range(count)]
    finishes: list[Finish | None] = [None] * count
    own = {"specdec": resolved_of(first[1].seed, first[1].resolved)}
    async with aclosing(rest):
        if asked.chat:
            yield frame.piece([each.opening() for each in choices], **usage, **own)
        chunk: tuple[int, Chunk] | None = first
        while chunk is not None:
            number, piece = chunk
            index = asked.samples * number + piece.index
            finishes[index] = piece.finish
            told: Json = {} if chunk is not first or asked.chat else own
            if piece.finish is not None:
                told = {**told, "system_fingerprint": fingerprint([piece.finish])}
            yield frame.piece([choices[index].piece(piece)], **usage, **told)
            chunk = await _in_our_words(anext(rest, None))
    if asked.usage_in_stream:
        ended = [each for each in finishes if each is not None]
        yield frame.piece([], usage=usage_of(ended, len(asked.prompts)))


async def _together(calls: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Wait for all calls; the first that fails ends them all."""
    if len(calls) == 1:
        return [await _in_our_words(calls[0])]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_in_our_words(call)) for call in calls]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def _in_our_words(work: Awaitable[Answer]) -> Answer:
    """Wait for a call; an error of the gRPC API becomes one of this API."""
    try:
        return await work
    except SpecdecError as error:
        raise from_specdec(error) from error
