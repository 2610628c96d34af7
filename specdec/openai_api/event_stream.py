"""Server-sent events: an answer in pieces, each sent as soon as it is available."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

import structlog
from starlette.types import Receive, Scope, Send

from specdec.openai_api.errors import ApiError, shutting_down
from specdec.openai_api.json_text import as_bytes, encoded
from specdec.openai_api.presence import CallerLeftError, while_present

log = structlog.get_logger()

DONE = b"data: [DONE]\n\n"

COMMENT = b":\n\n"
QUIET_SECONDS = 15.0
"""Seconds without an event after which a ping is sent: a held-back tool call or hidden reasoning may take minutes, and
proxies cut silent connections after 60 s."""

HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # tells proxies not to buffer
)

PING = "specdec.ping"
"""Key of the ASGI messages that are pings, not parts of the answer."""

FAILED = "specdec.failed"
"""ASGI scope key for a failure in mid-stream: the HTTP status of the same failure before the first event."""

IGNORED_HEADER = "specdec-ignored"
MAX_HEADER_CHARACTERS = 1024
"""Response header with the names of ignored fields, and its maximum length."""

MISTAKE = ApiError(500, "internal error, see the log of the server", "server_error", code="internal")


def event_of(content: Mapping[str, Any]) -> bytes:
    return as_bytes(f"data: {encoded(content, ascii=True)}\n\n")


def typed_event_of(content: Mapping[str, Any]) -> bytes:
    """Return an event named after its type."""
    return f"event: {content['type']}\n".encode() + event_of(content)


def ignored_header(names: Sequence[str]) -> dict[str, str]:
    """Return the header with the names of ignored fields, percent-encoded and truncated."""
    value = ", ".join(quote(name, safe="[].", errors="replace") for name in names)[:MAX_HEADER_CHARACTERS]
    return {IGNORED_HEADER: value.rstrip(", ")} if value else {}


class EventStream:
    """An answer sent as events. An error after the start is sent as the events that `failed` returns."""

    status_code = 200

    def __init__(
        self,
        events: AsyncGenerator[Mapping[str, Any], None],
        *,
        encode: Callable[[Mapping[str, Any]], bytes] = event_of,
        failed: Callable[[ApiError], Iterable[Mapping[str, Any]]] = lambda error: [error.body],
        end: bytes = DONE,
        headers: Mapping[str, str] = MappingProxyType({}),
        ping: bytes = COMMENT,
        quiet_seconds: float = QUIET_SECONDS,
    ) -> None:
        """`encode` returns the bytes of an event; `end`: bytes after the last event; `headers`: further headers;
        `ping`: bytes to send whenever there was no event for `quiet_seconds`."""
        self._headers = [*HEADERS, *((name.encode(), value.encode()) for name, value in headers.items())]
        self._events = events
        self._encode = encode
        self._failed = failed
        self._end = end
        self._ping = ping
        self._quiet_seconds = quiet_seconds
        self._last = 0.0  # loop time of the last event or ping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self._headers})
            try:
                with contextlib.suppress(CallerLeftError):
                    await while_present(receive, self._send(scope, send))
            except asyncio.CancelledError:  # by the server, at the drain's deadline
                await self._end_failed(shutting_down(), scope, send)
                raise

    async def _send(self, scope: Scope, send: Send) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with self._pinging(send):
                async for event in self._events:
                    await send({"type": "http.response.body", "body": self._encode(event), "more_body": True})
                    self._last = loop.time()
        except Exception as error:
            failure = error if isinstance(error, ApiError) else MISTAKE
            if failure is MISTAKE:
                log.exception("request_failed", path=scope["path"])
            await self._end_failed(failure, scope, send)
        else:
            await send({"type": "http.response.body", "body": self._end, "more_body": False})

    @asynccontextmanager
    async def _pinging(self, send: Send) -> AsyncIterator[None]:
        """Send pings while the events are quiet."""
        pings = asyncio.create_task(self._send_pings(send))
        try:
            yield
        finally:
            pings.cancel()
            await asyncio.gather(pings, return_exceptions=True)

    async def _send_pings(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        self._last = loop.time()
        while True:
            left = self._last + self._quiet_seconds - loop.time()
            if left > 0:
                await asyncio.sleep(left)
                continue
            await send({"type": "http.response.body", "body": self._ping, "more_body": True, PING: True})
            self._last = loop.time()

    async def _end_failed(self, error: ApiError, scope: Scope, send: Send) -> None:
        scope[FAILED] = error.status
        for event in self._failed(error):
            await send({"type": "http.response.body", "body": self._encode(event), "more_body": True})
        await send({"type": "http.response.body", "body": self._end, "more_body": False})
