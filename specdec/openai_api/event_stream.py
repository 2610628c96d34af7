"""Server-sent events: an answer in pieces, each sent as soon as it is there."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any

from starlette.types import Receive, Scope, Send

from specdec.openai_api.errors import ApiError
from specdec.openai_api.presence import CallerLeftError, while_present

DONE = b"data: [DONE]\n\n"


class EventStream:
    """An answer of events. An error in the middle is an event too, the last one."""

    def __init__(self, events: AsyncIterator[Mapping[str, Any]], headers: Mapping[str, str]) -> None:
        self.status_code = 200
        self._events = events
        self._headers = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",  # to proxies that would gather the pieces
            **headers,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(name.encode(), value.encode()) for name, value in self._headers.items()]
        await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
        with contextlib.suppress(CallerLeftError):
            await while_present(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        async def put(body: bytes, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": body, "more_body": more})

        async with aclosing(self._events) as events:  # type: ignore[type-var]
            try:
                async for event in events:
                    await put(event_of(event))
            except ApiError as error:
                await put(event_of(error.body))
        await put(DONE, more=False)


def event_of(content: Mapping[str, Any]) -> bytes:
    return f"data: {json.dumps(content, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()
