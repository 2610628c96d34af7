"""HTTP connections: limits on their number and headers, and the answers of a full server.

On their own, uvicorn and h11 wait forever for slow headers, refuse requests rather than connections, accept headers of
any length in one piece, and take seconds to parse some short ones.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from typing import Any, cast

import h11
from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

from specdec.openai_api.bodies import EVICTABLE, LINGER_BYTES, LINGER_SECONDS
from specdec.openai_api.callers import network_of
from specdec.openai_api.errors import ApiError, overloaded
from specdec.openai_api.event_stream import FAILED
from specdec.openai_api.routes import PROBES

MAX_HEADER_BYTES = 32 << 10
"""Maximum bytes of the request line and headers: h11 takes 1 us per byte in the worst case, on the event loop."""

MAX_HEADER_LINES = 256
"""Maximum number of header lines, request line included: h11 takes 3 us per line."""

MAX_CHUNK_LINE = 1 << 10
"""Maximum bytes of a chunk's size line, or of the trailer: h11 parses a trailer in quadratic time."""

PIECE_BYTES = 1 << 10
"""Bytes of a chunked body passed to h11 per call: up to 170 chunks, which take 1 ms."""

PIECES_A_TURN = 8
"""Number of such pieces before yielding to the event loop."""

MAX_AHEAD = 64 << 10
"""Maximum bytes read ahead while a request is being answered."""

GRACE_SECONDS = 1.0
"""Seconds during which a connection without complete headers is not evicted."""

SHORT_GRACE_SECONDS = 0.1
"""The same for a network that has more than half of the maximum number of connections."""

FLUSH_SECONDS = 10.0
"""Seconds for a caller to read the rest of an answer before its connection may be evicted."""

MAX_HEALTH_ONLY = 64
"""Maximum connections above the limit that may send a request; further ones are refused unread."""

_HEAD_END = re.compile(rb"\n\r?\n")
_BAD_HEAD = re.compile(rb"[\x00\x0b\x0c]|\r(?!\n)|\n[ \t]")
"""Forbidden in headers: control characters that make h11 backtrack over the blanks before them (20,000 blanks take 3
s), and folded lines (RFC 9112, section 5.2)."""


def plain_answer(error: ApiError) -> bytes:
    """Return the complete HTTP response for an error on a connection without a request. It closes the connection."""
    body = json.dumps(error.body).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers}
    lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}", *(f"{k}: {v}" for k, v in headers.items())]
    return "\r\n".join([*lines, "connection: close", "", ""]).encode() + body


NO_ROOM = overloaded("too many connections")
NO_ROOM_ANSWER = plain_answer(NO_ROOM)


class Connections:
    """The connections being served, and the choice of one to evict for a new one."""

    def __init__(self, most: int, refused: Callable[[int], None] = lambda _: None) -> None:
        """`refused` is called with the status of each answer that a connection gives without the application."""
        self.refused = refused
        self._most = most
        self._by_network: dict[str, dict[HttpConnection, None]] = {}  # longest-waiting first
        self._served = 0
        self.health_only = 0

    def has_room(self) -> bool:
        """Return whether there is room for one more connection, evicting one if necessary."""
        if self._served >= self._most and (victim := self._victim()) is not None:
            self.remove(victim)
            victim.evict()
        return self._served < self._most

    def add(self, connection: HttpConnection) -> None:
        self._by_network.setdefault(connection.network, {})[connection] = None
        self._served += 1

    def answered(self, connection: HttpConnection) -> None:
        """Move a connection to the end of its network's queue: its idle time starts now."""
        own = self._by_network.get(connection.network, {})
        if connection in own:
            del own[connection]
            own[connection] = None

    def remove(self, connection: HttpConnection) -> None:
        own = self._by_network.get(connection.network, {})
        if connection in own:
            del own[connection]
            self._served -= 1
            if not own:
                del self._by_network[connection.network]

    def _victim(self) -> HttpConnection | None:
        """Return the longest-waiting evictable connection, largest network first; None if all are busy."""
        for own in sorted(self._by_network.values(), key=len, reverse=True):
            grace = SHORT_GRACE_SECONDS if len(own) > self._most // 2 else GRACE_SECONDS
            for connection in own:
                if connection.gives_way(grace):
                    return connection
        return None


class HttpConnection(H11Protocol):
    """uvicorn's connection with limits. h11 gets headers only when they are complete and within the limits, bodies in
    pieces that take milliseconds, and no request before the previous one is answered."""

    def __init__(self, *args: Any, header_seconds: float, connections: Connections, **options: Any) -> None:
        super().__init__(*args, **options)
        self.network = ""
        self._header_seconds = header_seconds
        self._all = connections
        self._health_only = False
        self._ahead = bytearray()  # received but not yet passed to h11
        self._is_chunked = False  # of the current body
        self._body_left = 0  # bytes of an unchunked body still to come
        self._waiting: asyncio.TimerHandle | None = None  # timeout for headers
        self._since = 0.0  # start of the current wait
        self._next_piece: asyncio.Handle | None = None
        self._refused = False
        self._discarded = 0  # bytes since the refusal

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(transport, self._is_full)
        self.network = network_of(self.client[0] if self.client else "")
        if self._all.has_room():
            self._all.add(self)
        elif self._all.health_only < MAX_HEALTH_ONLY:
            self._all.health_only += 1
            self._health_only = True
            self.app = health_alone(self.app, self._all.refused)
        else:
            self._all.refused(NO_ROOM.status)
            transport.write(NO_ROOM_ANSWER)
            transport.close()
            return
        self._wait()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            self._discarded += len(data)
            if self._discarded > LINGER_BYTES:  # this caller may lose its answer
                self.transport.close()
            return
        self._unset_keepalive_if_required()
        self._ahead += data
        if self._next_piece is None:
            self._feed()

    def connection_lost(self, exc: Exception | None) -> None:
        self._ahead.clear()
        for timer in (self._waiting, self._next_piece):
            if timer is not None:
                timer.cancel()
        self._all.remove(self)
        if self._health_only:
            self._health_only = False
            self._all.health_only -= 1
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._since = self.loop.time()
        self._all.answered(self)
        if self._ahead and self._next_piece is None and not self.transport.is_closing():
            self._unset_keepalive_if_required()
            self._next_piece = self.loop.call_soon(self._feed)

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, "the request is not valid HTTP", code="invalid_http"))

    def gives_way(self, grace: float) -> bool:
        """Return whether the connection may be evicted: it has sent no request for `grace` seconds, or its last request
        is answered or refused."""
        if self._is_idle and self.transport.get_write_buffer_size():  # the end of an answer is being sent
            return self.loop.time() - self._since >= FLUSH_SECONDS
        if self._is_idle and (self.cycle is None or self._ahead):
            return self.loop.time() - self._since >= grace
        return self._is_idle or self._refused or EVICTABLE in self.cycle.scope

    def evict(self) -> None:
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _feed(self) -> None:
        """Pass received bytes to h11, as far as the limits allow now."""
        self._next_piece = None
        for _ in range(PIECES_A_TURN):
            size = self._next_size()
            if not size:
                break
            piece = bytes(self._ahead[:size])
            del self._ahead[:size]
            is_head = self.conn.their_state is h11.IDLE
            super().data_received(piece)
            if self._refused:
                return
            if is_head:
                given = dict(self.headers)
                self._is_chunked = b"transfer-encoding" in given
                self._body_left = int(given.get(b"content-length", 0))
            elif self._is_chunked:
                self._check_chunks()
            else:
                self._body_left -= len(piece)
        if self._refused or self.transport.is_closing():
            return
        self._wait()
        if self._next_size():
            self._next_piece = self.loop.call_soon(self._feed)
        if self._is_full():
            self.flow.pause_reading()
        else:
            self.flow.resume_reading()

    def _is_full(self) -> bool:
        """Return whether to stop reading: too much was read ahead, or the application leaves too much of the body
        unread. A refused connection is read until it closes."""
        unread = 0 if self._is_idle else len(self.cycle.body)
        return not self._refused and (len(self._ahead) > MAX_AHEAD or unread > HIGH_WATER_LIMIT)

    def _next_size(self) -> int:
        """Return the number of bytes to pass to h11 next; 0 for none now."""
        if not self._ahead or self._refused or self.transport.is_closing():
            return 0
        if self.conn.their_state is h11.IDLE:
            return self._header_size()
        if self.conn.their_state is h11.SEND_BODY:
            return PIECE_BYTES if self._is_chunked else self._body_left
        return 0  # the request is complete but not answered yet

    def _check_chunks(self) -> None:
        rest = len(self.conn.trailing_data[0])  # read once: each access copies h11's buffer
        if self.conn.their_state is not h11.SEND_BODY:
            self._is_chunked = False
            if rest:  # belongs to the next request, already in h11 and thus unchecked
                self.cycle.keep_alive = False
        elif rest > MAX_CHUNK_LINE:
            problem = f"the line of a chunk or the trailer is longer than {MAX_CHUNK_LINE} bytes"
            self._refuse(ApiError(400, problem, code="invalid_http"))

    def _header_size(self) -> int:
        """Return the size of the headers if they are complete, else 0. Excessive or malformed ones are refused."""
        if self._ahead[0] <= 0x20:  # invalid start of a request: h11 reports it
            return 1
        found = _HEAD_END.search(self._ahead)
        size = len(self._ahead) if found is None else found.end()
        if size > MAX_HEADER_BYTES:
            problem = f"the request's line and headers have more than {MAX_HEADER_BYTES} bytes"
        elif self._ahead.count(b"\n", 0, size) > MAX_HEADER_LINES:
            problem = f"the request's line and headers have more than {MAX_HEADER_LINES} lines"
        elif _BAD_HEAD.search(self._ahead, 0, size - 1 if found is None else size):  # a final \r may get its \n later
            self._refuse(ApiError(400, "a header has a folded line or a control character", code="invalid_http"))
            return 0
        else:
            return 0 if found is None else size
        self._refuse(ApiError(431, problem, code="headers_too_long"))
        return 0

    def _refuse(self, error: ApiError) -> None:
        """Answer an invalid request, give its caller time to read the answer, then close the connection."""
        self._refused = True
        self._ahead.clear()
        self._wait(over=True)
        if self._is_idle:
            self._all.refused(error.status)
        else:
            cast("Any", self.cycle.scope)[FAILED] = error.status  # uvicorn's type has only the specification's keys
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self._is_idle or not self.cycle.response_started:
            self.transport.write(plain_answer(error))
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            with suppress(OSError):  # the caller may have reset the connection
                self.transport.write_eof()
        self._waiting = self.loop.call_later(LINGER_SECONDS, self.transport.close)

    def _wait(self, *, over: bool = False) -> None:
        """Start the timeout for headers, or stop it while a request is being answered or when the connection is
        `over`."""
        if over or not self._is_idle:
            if self._waiting is not None:
                self._waiting.cancel()
                self._waiting = None
        elif self._waiting is None:
            self._since = self.loop.time()
            self._waiting = self.loop.call_later(self._header_seconds, self.transport.close)


class _Flow(FlowControl):
    """uvicorn's flow control, except that the application cannot resume reading while the connection is full."""

    def __init__(self, transport: asyncio.Transport, is_full: Callable[[], bool]) -> None:
        super().__init__(transport)
        self._is_full = is_full

    def resume_reading(self) -> None:
        if not self._is_full():
            super().resume_reading()


def health_alone(app: ASGIApp, refused: Callable[[int], None]) -> ASGIApp:
    """Return the application for a connection above the limit. It serves one request: a health check is answered, so
    that probes see a live server; anything else is `refused` with 503."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def closing(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        if scope["method"] in ("GET", "HEAD") and scope["path"] in PROBES:
            await app(scope, receive, closing)
        else:
            refused(NO_ROOM.status)
            await JSONResponse(NO_ROOM.body, NO_ROOM.status, NO_ROOM.headers)(scope, receive, closing)

    return answer
