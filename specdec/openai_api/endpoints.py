"""The endpoints of the Responses and the Messages API: from a body to an answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from specdec.openai_api.anthropic.answer import MessageAnswer
from specdec.openai_api.anthropic.request import NAMES, MessagesRequest, parse_count, parse_messages
from specdec.openai_api.errors import ApiError, refused, unsupported
from specdec.openai_api.event_stream import EventStream, ignored_header, typed_event_of
from specdec.openai_api.gateway import Caller, Gateway
from specdec.openai_api.json_text import Json, encoded
from specdec.openai_api.parsing import Parser
from specdec.openai_api.parts import EndPart, Part
from specdec.openai_api.presence import while_present
from specdec.openai_api.requests import PROMPT_FIELDS, fields_of
from specdec.openai_api.responses.answer import ResponseAnswer
from specdec.openai_api.responses.request import Reader, ResponsesRequest
from specdec.openai_api.responses.store import ResponseStore, not_found
from specdec.wire.request_id import new_request_id

Parts = AsyncGenerator[Part, None]

MAX_LISTED = 100
"""Maximum input items in one list."""


class Responses:
    """The endpoints of the Responses API."""

    def __init__(
        self,
        gateway: Gateway,
        parser: Parser,
        store: ResponseStore | None,
        read: Callable[[Request], Awaitable[bytes]],
        caller: Callable[[Request], tuple[Caller, str]],
        *,
        strict: bool = False,
    ) -> None:
        """`store`: None if nothing is stored; `read` returns a request's body, `caller` its caller for orchestrators
        and the name under which its share is counted. With `strict`, unknown fields are refused."""
        self._strict = strict
        self._gateway = gateway
        self._parser = parser
        self._store = store
        self._read = read
        self._caller = caller

    async def create(self, http: Request) -> Response | EventStream:
        body = await self._read(http)
        caller, owner = self._caller(http)
        reader = await self._parser.parse(len(body), lambda: Reader(fields_of(body), strict=self._strict), owner)
        stores = self._stores(reader)
        earlier, size = await self._earlier(owner, reader.previous)
        begun = self._begun(reader, earlier, len(body) + size, caller, owner)
        request, parts = await while_present(http.receive, begun)
        answer = ResponseAnswer(request, f"resp_{new_request_id()}", stored=stores)
        events = self._events(answer, request, parts, owner if stores else None)
        told = ignored_header(reader.ignored)
        if request.chat.stream:
            return EventStream(events, encode=typed_event_of, failed=answer.failed, end=b"", headers=told)
        await while_present(http.receive, _exhausted(events))
        return Response(encoded(answer.response), headers=told, media_type="application/json")

    async def retrieve(self, http: Request) -> JSONResponse:
        if http.query_params.get("stream", "false") != "false":
            raise unsupported("stream", "is not supported for a response that is complete")
        return JSONResponse((await self._stored(http)).response)

    async def delete(self, http: Request) -> JSONResponse:
        found, owner = http.path_params["response"], self._caller(http)[1]
        if self._store is None:
            raise not_found(found)
        await self._store.delete(owner, found)
        return JSONResponse({"id": found, "object": "response", "deleted": True})

    async def input_items(self, http: Request) -> JSONResponse:
        stored = await self._stored(http)
        asked = http.query_params
        items = [
            {"type": "message", "id": f"in_{stored.response['id']}_{index}"} | item
            for index, item in enumerate(stored.items)
        ]
        if asked.get("order", "desc") == "desc":
            items.reverse()
        ids = [item["id"] for item in items]
        if (after := asked.get("after")) is not None:
            if after not in ids:
                raise refused("after", "is no item of this response")
            items = items[ids.index(after) + 1 :]
        limit = asked.get("limit", "20")
        if not limit.isdecimal() or not 1 <= int(limit) <= MAX_LISTED:
            raise refused("limit", f"must be a number from 1 to {MAX_LISTED}")
        shown = items[: int(limit)]
        first, last = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
        return JSONResponse(
            {"object": "list", "data": shown, "first_id": first, "last_id": last, "has_more": len(shown) < len(items)}
        )

    async def cancel(self, http: Request) -> JSONResponse:
        await self._stored(http)
        raise unsupported("background", "is not supported, so there is nothing to cancel: close the connection instead")

    async def _stored(self, http: Request) -> Any:
        found, owner = http.path_params["response"], self._caller(http)[1]
        if self._store is None:
            raise not_found(found)
        return await self._store.get(owner, found)

    async def _earlier(self, owner: str, previous: str) -> tuple[list[Json], int]:
        """Return the items that a request continues, and their bytes."""
        if not previous:
            return [], 0
        if self._store is None:
            raise unsupported("previous_response_id", "is not supported: this server stores no responses")
        try:
            return await self._store.conversation(owner, previous)
        except ApiError as error:
            raise ApiError(
                error.status, error.message, param="previous_response_id", code="previous_response_not_found"
            ) from None

    async def _begun(
        self, reader: Reader, earlier: list[Json], size: int, caller: Caller, owner: str
    ) -> tuple[ResponsesRequest, Parts]:
        """Start to generate; drop the oldest items as long as the prompt is too long, if the request allows it."""
        cuts = reader.cuts(earlier)
        cut: int | None = 0
        while True:
            request = await self._parser.parse(size, partial(reader.request, earlier, cut or 0), owner)
            request = replace(request, chat=await self._gateway.named(request.chat, caller))
            try:
                return request, await self._gateway.parts(request.chat, caller)
            except ApiError as error:
                cut = next(cuts, None) if error.code == "context_length_exceeded" else None
                if cut is None:
                    raise

    def _stores(self, reader: Reader) -> bool:
        """Return whether to store the response: by default if this server stores any."""
        if reader.stores and self._store is None:
            raise unsupported("store", "is not supported: this server stores no responses")
        return self._store is not None and reader.stores is not False

    async def _events(
        self, answer: ResponseAnswer, request: ResponsesRequest, parts: Parts, owner: str | None
    ) -> AsyncGenerator[Json, None]:
        """Yield the events of a response. It is stored for `owner` before its last event: the caller may continue it at
        once."""
        async with aclosing(parts):
            for event in answer.begin():
                yield event
            async for part in parts:
                events = list(answer.add(part))
                if isinstance(part, EndPart) and owner is not None and self._store is not None:
                    await self._store.put(owner, request.items, answer.response)
                for event in events:
                    yield event


class Messages:
    """The endpoints of the Messages API."""

    def __init__(
        self,
        gateway: Gateway,
        parser: Parser,
        read: Callable[[Request], Awaitable[bytes]],
        caller: Callable[[Request], tuple[Caller, str]],
        *,
        strict: bool = False,
    ) -> None:
        """`read` returns a request's body, `caller` its caller for orchestrators and the name under which its share is
        counted. With `strict`, unknown fields are refused."""
        self._strict = strict
        self._gateway = gateway
        self._parser = parser
        self._read = read
        self._caller = caller

    async def create(self, http: Request) -> Response | EventStream:
        body = await self._read(http)
        caller, owner = self._caller(http)
        work = partial(_parsed_messages, body, strict=self._strict)
        request = await self._parser.parse(len(body), work, owner)
        request = replace(request, chat=await self._gateway.named(request.chat, caller))
        parts = await while_present(http.receive, self._gateway.parts(request.chat, caller))
        answer = MessageAnswer(request, new_request_id())
        events = _message_events(answer, parts)
        told = ignored_header(request.ignored)
        if request.chat.stream:
            return EventStream(events, encode=typed_event_of, failed=answer.failed, end=b"", headers=told)
        await while_present(http.receive, _exhausted(events))
        return Response(encoded(answer.message), headers=told, media_type="application/json")

    async def count_tokens(self, http: Request) -> JSONResponse:
        body = await self._read(http)
        caller, owner = self._caller(http)
        model, prompt = await self._parser.parse(len(body), lambda: parse_count(fields_of(body)), owner)
        counted = self._gateway.count_tokens(model, prompt, {**PROMPT_FIELDS, **NAMES}, caller)
        return JSONResponse({"input_tokens": await while_present(http.receive, counted)})


def _parsed_messages(body: bytes, *, strict: bool) -> MessagesRequest:
    return parse_messages(fields_of(body), strict=strict)


async def _message_events(answer: MessageAnswer, parts: Parts) -> AsyncGenerator[Json, None]:
    async with aclosing(parts):
        for event in answer.begin():
            yield event
        async for part in parts:
            for event in answer.add(part):
                yield event


async def _exhausted(events: AsyncGenerator[Json, None]) -> None:
    async with aclosing(events):
        async for _ in events:
            pass
