"""The endpoints of the Responses and the Messages API: from a body to an answer."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import ExitStack, aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from specdec.openai_api.anthropic_answer import PING, MessageAnswer
from specdec.openai_api.anthropic_request import MessagesRequest, parse_count, parse_messages
from specdec.openai_api.bodies import MAX_BODY_BYTES, Bodies
from specdec.openai_api.errors import ApiError, refused, unsupported, wrong
from specdec.openai_api.event_stream import COMMENT, EventStream, ignored_header, typed_event_of
from specdec.openai_api.gateway import Gateway
from specdec.openai_api.json_text import Json, as_bytes, encoded
from specdec.openai_api.parsing import Intake, TakenRequest
from specdec.openai_api.parts import Part
from specdec.openai_api.presence import while_present
from specdec.openai_api.response_store import ResponseStore, not_found
from specdec.openai_api.responses_answer import ResponseAnswer
from specdec.openai_api.responses_request import ResponsesReader, ResponsesRequest
from specdec.v2.generation_pb2 import TokenizeRequest
from specdec.wire.request_metadata import new_request_id

Parts = AsyncGenerator[Part, None]
Found = TypeVar("Found")

SENT_AT_ONCE = 64 << 10
"""Bytes of a stored response that are sent without waiting for their reader."""

MAX_LISTED = 100
"""Maximum input items in one list."""

MAX_REFERENCES = 256
"""Maximum references to items of stored responses in one request."""

_ITEM_ID = re.compile(r"(?:msg|rs|fc|ctc)_([0-9a-f]{1,64})_\d{1,6}")
"""Matches ids of output items; its group is the hexadecimal part of the response's id."""


class StoredAnswer:
    """A stored response being sent. The reader may be slow, so the bytes count against the owner's limit until they are
    sent, like a body's. ApiError if there is no room."""

    status_code = 200

    def __init__(self, content: bytes, bodies: Bodies, owner: str) -> None:
        self._content = content
        self._bodies = bodies
        self._owner = owner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        size = len(self._content)
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % size)]
        with self._bodies.reserved(self._owner, size):
            await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
            for begin in range(0, size, SENT_AT_ONCE):  # the server waits for the reader between pieces
                piece = self._content[begin : begin + SENT_AT_ONCE]
                await send({"type": "http.response.body", "body": piece, "more_body": begin + SENT_AT_ONCE < size})


class Responses:
    """The endpoints of the Responses API."""

    def __init__(self, gateway: Gateway, intake: Intake, store: ResponseStore | None) -> None:
        """`store`: None if nothing is stored."""
        self._gateway = gateway
        self._intake = intake
        self._store = store

    async def create(self, http: Request) -> Response | EventStream:
        taken = await self._intake.take(http, ResponsesReader)
        stores = self._stores(taken.request)
        async with self._continued(taken) as (earlier, size):
            request, parts = await while_present(http.receive, self._begun(taken, earlier, size))
        answer = ResponseAnswer(request, f"resp_{new_request_id()}", stored=stores)
        events = self._events(answer, request, parts, taken.owner if stores else None)
        return await _sent(http, request, answer, events)

    async def count_tokens(self, http: Request) -> JSONResponse:
        taken = await self._intake.take(http, ResponsesReader)
        reader, caller, owner = taken.request, taken.caller, taken.owner
        async with self._continued(taken) as (earlier, size):
            request = await self._intake.parser.parse(size, partial(reader.request, earlier), owner)
            chat = request.chat
            message = TokenizeRequest(model=chat.model, chat=chat.message(0).chat)
            tokenized = self._gateway.tokenized(message, chat.names, caller, chat.places)
            count = (await while_present(http.receive, tokenized)).count
        fields = {"object": "response.input_tokens", "input_tokens": count}
        return JSONResponse(fields, headers=ignored_header(request.ignored))

    async def retrieve(self, http: Request) -> StoredAnswer:
        if http.query_params.get("stream", "false") != "false":
            raise unsupported("stream", "is not supported for a response that is complete")
        text = await self._stored(http, ResponseStore.get)
        return StoredAnswer(as_bytes(text), self._intake.bodies, self._intake.who(http)[1])

    async def delete(self, http: Request) -> JSONResponse:
        await self._stored(http, ResponseStore.delete)
        return JSONResponse({"id": http.path_params["response"], "object": "response", "deleted": True})

    async def input_items(self, http: Request) -> StoredAnswer:
        items, owner = await self._stored(http, ResponseStore.items), self._intake.who(http)[1]
        listed = partial(_listed, items, http.path_params["response"], http.query_params)
        return StoredAnswer(await self._intake.parser.parse(len(items), listed, owner), self._intake.bodies, owner)

    async def cancel(self, http: Request) -> Response:
        await self._stored(http, ResponseStore.get)
        raise unsupported("background", "is not supported, so there is nothing to cancel: close the connection instead")

    async def _stored(self, http: Request, what: Callable[[ResponseStore, str, str], Awaitable[Found]]) -> Found:
        """Return a part of the response that a request names; ApiError if the response is not stored."""
        found, owner = http.path_params["response"], self._intake.who(http)[1]
        if self._store is None:
            raise not_found(found)
        return await what(self._store, owner, found)

    @asynccontextmanager
    async def _continued(self, taken: TakenRequest[ResponsesReader]) -> AsyncIterator[tuple[list[Json], int]]:
        """Yield the items of the responses that a request continues, and the total bytes of stored data and body.
        Until the context exits, the stored bytes count against the caller's limit, like a body's."""
        reader, owner = taken.request, taken.owner
        chain, size = await self._chain(owner, reader.previous)
        with ExitStack() as stack:
            stack.enter_context(self._intake.bodies.reserved(owner, size))
            size += await self._resolve(reader, owner, stack)
            earlier = await self._store.conversation(owner, chain) if self._store is not None and chain else []
            yield earlier, taken.size + size

    async def _chain(self, owner: str, previous: str) -> tuple[list[str], int]:
        """Return the ids of the responses that a request continues, and the total bytes of their items."""
        if not previous:
            return [], 0
        if self._store is None:
            raise unsupported("previous_response_id", "is not supported: this server stores no responses")
        try:
            chain, size = await self._store.chain(owner, previous)
        except ApiError as error:
            if error.code != "response_not_found":
                raise
            field = "previous_response_id"
            raise ApiError(400, error.message, param=field, code="previous_response_not_found") from None
        if size > MAX_BODY_BYTES:
            problem = f"continues {size} bytes, must be at most {MAX_BODY_BYTES}"
            raise ApiError(400, f"previous_response_id: {problem}", param="previous_response_id", code="body_too_long")
        return chain, size

    async def _resolve(self, reader: ResponsesReader, owner: str, stack: ExitStack) -> int:
        """Replace references to items of stored responses by the items; return the items' total bytes. They are
        reserved, response by response, until the stack is closed."""
        places = [index for index, item in enumerate(reader.items) if item.get("type") == "item_reference"]
        if len(places) > MAX_REFERENCES:
            raise refused("input", f"has {len(places)} references, must have at most {MAX_REFERENCES}")
        by_response: dict[str, dict[int, str]] = {}
        for index in places:
            item_id = reader.items[index].get("id")
            found = _ITEM_ID.fullmatch(item_id) if isinstance(item_id, str) else None
            if found is None or self._store is None:
                raise _no_item(index, item_id)
            by_response.setdefault(f"resp_{found[1]}", {})[index] = found[0]
        total = 0
        for response_id, ids in by_response.items():
            assert self._store is not None
            try:
                items = await self._store.output(owner, response_id, frozenset(ids.values()))
            except ApiError as error:
                if error.code != "response_not_found":
                    raise
                raise _no_item(*next(iter(ids.items()))) from None
            size = 0
            for index, item_id in ids.items():
                if item_id not in items:
                    raise _no_item(index, item_id)
                reader.items[index], item_bytes = items[item_id]
                size += item_bytes
            total += size
            if total > MAX_BODY_BYTES:
                raise refused("input", f"refers to more than {MAX_BODY_BYTES} bytes, the maximum")
            stack.enter_context(self._intake.bodies.reserved(owner, size))
        return total

    async def _begun(
        self, taken: TakenRequest[ResponsesReader], earlier: list[Json], size: int
    ) -> tuple[ResponsesRequest, Parts]:
        """Start generation. While the prompt is too long, drop the oldest items, if the request allows this."""
        refusal: ApiError | None = None
        for cut in (0, *taken.request.cuts(earlier)):
            read = partial(taken.request.request, earlier, cut)
            request = await self._intake.parser.parse(size, read, taken.owner)
            try:
                chat, parts = await self._gateway.parts(request.chat, taken.caller)
                return replace(request, chat=chat), parts
            except ApiError as error:
                if error.code != "context_length_exceeded":
                    raise
                refusal = error
        assert refusal is not None
        raise refusal

    def _stores(self, reader: ResponsesReader) -> bool:
        """Return whether to store the response; by default yes, if this server has a store."""
        if reader.stores and self._store is None:
            raise unsupported("store", "is not supported: this server stores no responses")
        return self._store is not None and reader.stores is not False

    async def _events(
        self, answer: ResponseAnswer, request: ResponsesRequest, parts: Parts, owner: str | None
    ) -> AsyncGenerator[Json, None]:
        """Yield the events of a response. It is stored for `owner` before its last event, so that the caller may
        continue it immediately."""
        async with aclosing(_events_of(answer, parts)) as events:
            async for event in events:
                yield event
        stored = False
        if owner is not None and self._store is not None:
            stored = await self._store.put(owner, request.items, answer.whole)
        yield answer.end(stored=stored)


class Messages:
    """The endpoints of the Messages API."""

    def __init__(self, gateway: Gateway, intake: Intake) -> None:
        self._gateway = gateway
        self._intake = intake

    async def create(self, http: Request) -> Response | EventStream:
        taken = await self._intake.take(http, parse_messages)
        request, caller = taken.request, taken.caller
        chat, parts = await while_present(http.receive, self._gateway.parts(request.chat, caller))
        request = replace(request, chat=chat)
        answer = MessageAnswer(request, caller.request_id)
        return await _sent(http, request, answer, _events_of(answer, parts), ping=typed_event_of(PING))

    async def count_tokens(self, http: Request) -> JSONResponse:
        taken = await self._intake.take(http, parse_count)
        message, request = taken.request
        tokenized = self._gateway.tokenized(message, request.chat.names, taken.caller, request.chat.places)
        count = (await while_present(http.receive, tokenized)).count
        return JSONResponse({"input_tokens": count}, headers=ignored_header(request.ignored))


def _no_item(index: int, item_id: object) -> ApiError:
    problem = f"input[{index}].id: {str(item_id)[:100]!r} is not a stored item"
    return ApiError(404, problem, param=f"input[{index}].id", code="item_not_found")


def _listed(items: str, response_id: str, asked: Mapping[str, str]) -> bytes:
    """Return the page of a response's input items that the query `asked` selects; `items` and the page are JSON."""
    found = [_list_entry(item, f"in_{response_id}_{number}") for number, item in enumerate(json.loads(items))]
    if (order := asked.get("order", "desc")) not in ("asc", "desc"):
        raise wrong("order", order, "asc or desc")
    if order == "desc":
        found.reverse()
    ids = [item["id"] for item in found]
    if (after := asked.get("after")) is not None:
        if after not in ids:
            raise refused("after", "is not an item of this response")
        found = found[ids.index(after) + 1 :]
    limit = asked.get("limit", "20")
    if len(limit) > 3 or not limit.isdecimal() or not 1 <= int(limit) <= MAX_LISTED:
        raise wrong("limit", limit, f"a number from 1 to {MAX_LISTED}")
    shown = found[: int(limit)]
    first, last = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
    has_more = len(shown) < len(found)
    fields = {"object": "list", "data": shown, "first_id": first, "last_id": last, "has_more": has_more}
    return as_bytes(encoded(fields))


def _list_entry(item: Json, item_id: str) -> Json:
    """Return an input item as shown in lists: with an id of this server, and its content in parts."""
    fields: Json = {"type": "message"} | item | {"id": item_id}
    if isinstance(content := fields.get("content"), str):
        kind = "output_text" if fields.get("role") == "assistant" else "input_text"
        fields["content"] = [{"type": kind, "text": content}]
    return fields


async def _events_of(answer: ResponseAnswer | MessageAnswer, parts: Parts) -> AsyncGenerator[Json, None]:
    """Yield the events of an answer's parts."""
    async with aclosing(parts):
        async for part in parts:
            for event in answer.add(part):
                yield event


async def _sent(
    http: Request,
    request: ResponsesRequest | MessagesRequest,
    answer: ResponseAnswer | MessageAnswer,
    events: AsyncGenerator[Json, None],
    ping: bytes = COMMENT,
) -> Response | EventStream:
    """Return the answer as requested: as a stream of events, or complete at the end."""
    headers = ignored_header(request.ignored)
    if request.chat.stream:
        return EventStream(events, encode=typed_event_of, failed=answer.failed, end=b"", headers=headers, ping=ping)
    await while_present(http.receive, _exhausted(events))
    return Response(as_bytes(encoded(answer.whole)), headers=headers, media_type="application/json")


async def _exhausted(events: AsyncGenerator[Json, None]) -> None:
    async with aclosing(events):
        async for _ in events:
            pass
