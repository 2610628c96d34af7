"""From a request to its answer: runs the gRPC streams of its prompts, and gathers or relays their chunks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from specdec.client import AsyncClient, Chunk, Model, Overloaded, SpecdecError
from specdec.client.endpoint import Metadata
from specdec.client.tokenized import Tokenized
from specdec.openai_api.answers import Calls, Choice, Frame, fingerprint, usage_of
from specdec.openai_api.errors import from_specdec, refused, unsupported
from specdec.openai_api.json_text import Json, json_list
from specdec.openai_api.parts import Part, parts_of
from specdec.openai_api.prompts import AnsweredPrompt, prompt_first
from specdec.openai_api.requests import ParsedRequest
from specdec.serving.interleaved import interleaved
from specdec.v2.generation_pb2 import GenerationServiceGetStatsRequest, TokenizeRequest
from specdec.wire.message_values import values_of
from specdec.wire.request_metadata import PROMPTS, REQUEST_ID_CHARACTERS, new_request_id
from specdec.wire.tool_formats import FORMATS, ToolFormat

PROMPTS_AT_ONCE = 8
"""Maximum concurrent prompts of one request. Each counts toward the tenant's limits, which may allow fewer."""

LIMIT_SECONDS = 90.0
"""Maximum total seconds that the prompts of a request wait for the tenant's limits, after one of them is answered. A
limit of requests per minute admits all of them within a minute, if the tenant has no other requests."""

MAX_ANSWER_CHARACTERS = 64 << 20
"""Maximum characters of an answer in one piece. Log-probabilities of a token with 20 alternatives take 1,000."""

STATS_SECONDS = 5.0
"""Timeout in seconds for statistics."""

Lend = Callable[[], AbstractAsyncContextManager[AsyncClient]]

Names = Mapping[str, str]
"""Names of options and gRPC fields, mapped to the caller's names."""

Chunks = AsyncGenerator[tuple[int, Chunk], None]
"""Chunks with their prompt's number."""


@dataclass(frozen=True)
class Caller:
    """A caller: its request id for logs and traces, and the headers to forward."""

    request_id: str
    metadata: Metadata = ()


class Gateway:
    """The gateway to orchestrators. Failures are raised as ApiError."""

    def __init__(self, client: Lend, control_client: Lend, key_client: Lend) -> None:
        """`client` lends a client for the duration of a completion; `control_client` lends one for control calls, which
        completions do not delay; `key_client` lends one to check a key that may be refused."""
        self._client = client
        self._control_client = control_client
        self._key_client = key_client

    async def models(self, caller: Caller) -> list[Model]:
        """Return the served models visible to the caller."""
        return await _models(self._control_client, caller)

    async def stats(self, caller: Caller) -> Json:
        """Return the statistics of an orchestrator and its pods that the caller may see."""
        try:
            async with self._control_client() as client:
                asked = GenerationServiceGetStatsRequest(pods=True)
                return values_of(await client.send_stats(asked, timeout=STATS_SECONDS, metadata=caller.metadata))
        except SpecdecError as error:
            raise from_specdec(error) from error

    async def check_key(self, authorization: str) -> None:
        """Check a key with an orchestrator's cheapest call; ApiError if the key is unknown."""
        metadata: Metadata = (("authorization", authorization),) if authorization else ()
        await _models(self._key_client, Caller(new_request_id(), metadata))

    async def answer(self, request: ParsedRequest, caller: Caller) -> bytes:
        """Generate all samples of all prompts; return the complete answer as JSON."""
        request = await self._named(request, caller)
        prompts = _prompts(request)
        tool_format, chunks = await self._begun(request, caller, prompts)
        answer = _Answer(request, caller, tool_format, prompts)
        async with aclosing(chunks):
            async for number, chunk in chunks:
                answer.note(number, chunk)
                answer.gather(number, chunk)
        return answer.frame.whole(answer.choices, prompts[0].fields if request.chat and prompts else {})

    async def events(self, request: ParsedRequest, caller: Caller) -> AsyncGenerator[Json, None]:
        """Generate all samples of all prompts; return the events of their stream. Errors before the first chunk are
        raised by this call."""
        request = await self._named(request, caller)
        prompts = _prompts(request)
        tool_format, chunks = await self._begun(request, caller, prompts)
        return _events(_Answer(request, caller, tool_format, prompts), chunks)

    async def parts(self, request: ParsedRequest, caller: Caller) -> tuple[ParsedRequest, AsyncGenerator[Part, None]]:
        """Generate the single sample of the single prompt; return the request with its model, and its parts. Errors
        before the first chunk are raised by this call."""
        if request.chunks:
            raise unsupported("specdec.chunks", "is for /v1/completions and /v1/chat/completions")
        request = await self._named(request, caller)
        tool_format, chunks = await self._begun(request, caller)
        calls = _calls(request, tool_format, new_request_id())
        of_one = _of_one_prompt(chunks)
        return request, parts_of(of_one, calls, reasoning=request.reasoning, with_end=request.tells_end)

    async def tokenized(
        self, request: TokenizeRequest, names: Names, caller: Caller, places: Sequence[str] = ()
    ) -> Tokenized:
        """Return the tokens of a prompt. `names` and `places` are the names of fields and messages in the caller's API,
        for errors."""
        try:
            async with self._client() as client:
                return await client.send_tokenize(request, metadata=caller.metadata)
        except SpecdecError as error:
            raise from_specdec(error, names, places) from error

    async def _named(self, request: ParsedRequest, caller: Caller) -> ParsedRequest:
        """Return the request. If it names no model, set the only served one."""
        if request.model:
            return request
        served = await self.models(caller)
        if len(served) != 1:
            problem = f"is missing, and {len(served)} models are served: GET /v1/models lists them"
            raise refused("model", problem)
        return replace(request, model=served[0].name)

    async def _begun(
        self, request: ParsedRequest, caller: Caller, prompts: Sequence[AnsweredPrompt] = ()
    ) -> tuple[ToolFormat | None, Chunks]:
        """Start generation and wait for the first chunk; return the format of the text's tool calls, and all chunks."""
        chunks = self._chunks(request, caller, prompts)
        try:
            first = await anext(chunks)
            return await self._tool_format(request, first[1], caller), _chained(first, chunks)
        except BaseException:
            await chunks.aclose()
            raise

    async def _tool_format(self, request: ParsedRequest, first: Chunk, caller: Caller) -> ToolFormat | None:
        """Return the format of the tool calls in the text that begins with this chunk; None if it has none."""
        if not request.calls_tools:
            return None
        name = "" if first.resolved is None else first.resolved.tool_format
        if not name:  # an older orchestrator does not send it with the text
            models = await self.models(caller)
            name = next((model.tool_format for model in models if model.is_asked_as(request.model)), "")
        if name and name not in FORMATS:
            raise unsupported("tools", f"the model writes calls in the format {name}, which this server cannot parse")
        return FORMATS.get(name)

    async def _chunks(self, request: ParsedRequest, caller: Caller, prompts: Sequence[AnsweredPrompt] = ()) -> Chunks:
        """Yield the chunks of all prompts in order of arrival. With `echo`, each of `prompts` gets its text before its
        first chunk."""
        places = _Places(len(request.prompts))
        several = len(request.prompts) > 1
        stream = partial(self._stream, request, caller, places, prompts, several=several)
        streams = [stream(number) for number in range(len(request.prompts))]
        try:
            async with aclosing(interleaved(streams) if several else streams[0]) as chunks:
                async for chunk in chunks:
                    yield chunk
        except SpecdecError as error:
            raise from_specdec(error, request.names, request.places) from error

    async def _stream(
        self,
        request: ParsedRequest,
        caller: Caller,
        places: _Places,
        prompts: Sequence[AnsweredPrompt],
        number: int,
        *,
        several: bool,
    ) -> Chunks:
        """Yield the chunks of one prompt. A prompt refused at a tenant limit is retried when another prompt of the
        request ends. If no other one is running, it is retried after the limit's delay."""
        if several:
            metadata = (*caller.metadata, (PROMPTS, str(len(request.prompts))))
            caller = replace(caller, request_id=_numbered(caller.request_id, number), metadata=metadata)
        begun = False
        await places.acquire()
        while True:
            try:
                async with aclosing(self._sent(request, caller, prompts, number)) as chunks:
                    async for chunk in chunks:
                        begun = True
                        yield number, chunk
            except Overloaded as error:
                if begun or error.reason != "TENANT_LIMIT":
                    raise
                if places.give_up():
                    await places.acquire()
                elif (seconds := places.delay(error)) is not None:
                    await asyncio.sleep(seconds)
                else:
                    raise
            else:
                places.answered()
                return

    async def _sent(
        self,
        request: ParsedRequest,
        caller: Caller,
        prompts: Sequence[AnsweredPrompt],
        number: int,
    ) -> AsyncGenerator[Chunk, None]:
        async with self._client() as client:
            if request.echo and not prompts[number].begun:  # a retry must not spend a tenant's limit on it again
                prompts[number].begin(await _text(client, request, number, caller))
            message = request.message(number)
            async with (
                client.send(message, request_id=caller.request_id, metadata=caller.metadata) as stream,
                aclosing(prompt_first(stream)) as chunks,
            ):
                async for chunk in chunks if request.scores_prompts else stream:
                    yield chunk


class _Places(asyncio.Semaphore):
    """Places for the running prompts of a request."""

    def __init__(self, prompts: int) -> None:
        self._left = min(prompts, PROMPTS_AT_ONCE)
        self._patience: float | None = None  # seconds that prompts may still wait; None: none is answered yet
        super().__init__(self._left)

    def answered(self) -> None:
        """Release the place of a prompt that is answered."""
        if self._patience is None:
            self._patience = LIMIT_SECONDS
        self.release()

    def delay(self, limit: Overloaded) -> float | None:
        """Return the seconds to wait before the prompt with the last place is sent again; None if the request fails
        instead."""
        seconds = max(1.0, limit.retry_after or 0.0)
        if self._patience is None or seconds > self._patience:
            return None
        self._patience -= seconds
        return seconds

    def give_up(self) -> bool:
        """Give up an acquired place for good, since the tenant has no room for it; return False for the last place."""
        if self._left == 1:
            return False
        self._left -= 1
        return True


def _prompts(request: ParsedRequest) -> list[AnsweredPrompt]:
    """Return the prompts to show in the answer, if any."""
    if not request.echo and request.prompt_logprobs is None:
        return []
    top = request.options.logprobs if request.echo and request.logprobs else None
    return [AnsweredPrompt(top, request.prompt_logprobs) for _ in request.prompts]


async def _text(client: AsyncClient, request: ParsedRequest, number: int, caller: Caller) -> bytes | None:
    """Return the text of a prompt, given or decoded from its tokens; None if it will be built from scored tokens."""
    prompt = request.prompts[number]
    if prompt.WhichOneof("prompt") == "text":
        return prompt.text.encode(errors="replace")
    if request.scores_prompts:
        return None
    asked = TokenizeRequest(model=request.model, tokens=prompt.tokens, pieces=True)
    response = await client.send_tokenize(asked, metadata=caller.metadata)
    return b"".join(piece.bytes for piece in response.pieces)


async def _chained(first: tuple[int, Chunk], rest: Chunks) -> Chunks:
    async with aclosing(rest):
        yield first
        async for found in rest:
            yield found


async def _of_one_prompt(chunks: Chunks) -> AsyncGenerator[Chunk, None]:
    async with aclosing(chunks):
        async for _, chunk in chunks:
            yield chunk


async def _models(lend: Lend, caller: Caller) -> list[Model]:
    try:
        async with lend() as client:
            return await client.models(metadata=caller.metadata)
    except SpecdecError as error:
        raise from_specdec(error) from error


@dataclass
class _Answer:
    """An answer under construction. Create it with the first chunk: by then an orchestrator has validated the request,
    including its number of samples, which has no limit here."""

    request: ParsedRequest
    caller: Caller
    tool_format: ToolFormat | None  # None: no tool calls in the text
    prompts: Sequence[AnsweredPrompt]  # empty: the answer shows no prompts
    frame: Frame = field(init=False)
    choices: list[Choice] = field(init=False)
    seeds: dict[int, int | None] = field(default_factory=dict)  # by prompt
    salt: str = field(default_factory=new_request_id)
    size: int = 0  # characters gathered for an answer in one piece

    def __post_init__(self) -> None:
        request = self.request
        kind = "chatcmpl" if request.chat else "cmpl"
        begun, answer_id = int(time.time()), f"{kind}-{self.caller.request_id}"
        self.frame = Frame(request.chat, answer_id, begun, request.model, request.ignored)
        self.choices = [
            Choice(
                index,
                request,
                # Salted: callers match results to calls by call id, and may use one request id for several requests.
                calls=_calls(request, self.tool_format, f"{self.salt}-{index}"),
                prompt=self.prompts[index // request.samples] if self.prompts and not request.chat else None,
            )
            for index in range(request.samples * len(request.prompts))
        ]

    def choice(self, number: int, chunk: Chunk) -> Choice:
        """Return the choice that a prompt's chunk belongs to."""
        return self.choices[self.request.samples * number + chunk.index]

    def gather(self, number: int, chunk: Chunk) -> None:
        """Keep a chunk for an answer in one piece; ApiError if the answer gets too long."""
        if self.prompts and chunk.prompt:
            self.size += self.prompts[number].gather(chunk.prompt) * self.request.samples
        self.size += self.choice(number, chunk).gather(chunk, self.seeds[number])
        if self.size > MAX_ANSWER_CHARACTERS:
            problem = f"the answer has more than {MAX_ANSWER_CHARACTERS} characters"
            raise refused("stream", f"is false, and {problem}: set it, or request fewer samples or log-probabilities")

    def echo(self, number: int, chunk: Chunk) -> list[Json]:
        """Return the stream pieces for the part of a prompt in a chunk: one for each sample, or none."""
        piece = self.prompts[number].echo(chunk.prompt) if self.prompts else None
        samples = self.request.samples
        return [] if piece is None else [{"index": samples * number + sample, **piece} for sample in range(samples)]

    def note(self, number: int, chunk: Chunk) -> None:
        """Record the fields that only a prompt's first chunk has. Token ids are encoded as they arrive: encoding the
        ids of all prompts together takes a tenth of a second."""
        if number in self.seeds:
            return
        self.seeds[number] = chunk.seed
        ids = chunk.prompt_token_ids
        encoded = "" if ids is None or self.request.stream else json_list(map(str, ids))
        echoed = len(self.prompts[number].text) if self.prompts else 0
        self.size += self.request.samples * (len(encoded) + echoed)
        for choice in self.choices[self.request.samples * number :][: self.request.samples]:
            choice.prompt_tokens = 0 if chunk.resolved is None else chunk.resolved.prompt_tokens
            choice.prompt_token_ids, choice.encoded_prompt = ids, encoded


def _calls(request: ParsedRequest, tool_format: ToolFormat | None, name: str) -> Calls | None:
    """Return the reader of a text's calls; None if it has none. `name` is unique to the sample."""
    return None if tool_format is None else Calls(tool_format, name, request.schemas, forced=request.forces_calls)


async def _events(answer: _Answer, chunks: Chunks) -> AsyncGenerator[Json, None]:
    """Yield the events of a stream."""
    request, frame = answer.request, answer.frame
    extra = frame.ignored_json  # of the first event

    def event(choices: Sequence[Json], choice: Choice, **others: Any) -> Json:
        nonlocal extra
        if request.usage_in_pieces or request.usage_in_stream:
            others["usage"] = choice.usage if request.usage_in_pieces else None
        others, extra = {**others, **extra}, {}
        return frame.piece(choices, **others)

    async with aclosing(chunks):
        first = await anext(chunks)
        answer.note(*first)
        if request.chat:
            if (prompt := answer.choices[0].prompt_token_ids) is not None:
                extra = {**extra, "prompt_token_ids": prompt}
            yield event([choice.opening() for choice in answer.choices], answer.choices[0])
        found: tuple[int, Chunk] | None = first
        while found is not None:
            number, chunk = found
            answer.note(number, chunk)
            choice = answer.choice(number, chunk)
            for part in answer.echo(number, chunk):  # one event each: a prompt may have megabytes
                yield event([part], choice)
            if not chunk.prompt or chunk.tokens or chunk.finish or chunk.resolved:
                *begun, last = choice.pieces(chunk, answer.seeds[number])
                ended: Json = {} if chunk.finish is None else {"system_fingerprint": fingerprint([choice])}
                for piece in begun:
                    yield event([piece], choice)
                yield event([last], choice, **ended)
            found = await anext(chunks, None)
    if request.usage_in_stream:
        of_all = fingerprint(answer.choices)  # SDKs keep that of the last event
        yield frame.piece([], usage=usage_of(answer.choices), system_fingerprint=of_all)


def _numbered(request_id: str, number: int) -> str:
    """Return the request id of one of several prompts: it ends with the prompt's number."""
    end = f"-{number}"
    return request_id[: REQUEST_ID_CHARACTERS - len(end)] + end
