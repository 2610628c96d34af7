"""Request bodies: limits on their memory, per caller and in total, and on slow senders."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Message, Receive, Scope

from specdec.openai_api.errors import ApiError, overloaded, too_many
from specdec.openai_api.structure import Structure

MAX_BODY_BYTES = 8 << 20
"""Maximum bytes of a request's body."""

MAX_BODIES_BYTES = 64 << 20
"""Maximum total bytes of the bodies in flight."""

MAX_RECEIVING = 128
"""Maximum number of one caller's bodies in flight."""

BODY_SECONDS = 30.0
"""Default deadline in seconds for receiving a body."""

MIN_BODY_RATE = 8 << 10
"""Minimum average rate of a body in bytes per second."""

RATE_GRACE_SECONDS = 2.0
"""Seconds excluded from the average: a network may pause."""

LINGER_SECONDS = 2.0
"""Seconds for which an unwanted body is read. Closing a connection before the caller has sent everything resets it, and
the caller may lose the answer."""

LINGER_BYTES = 256 << 10
LINGER_PAUSE_SECONDS = 0.03
"""Bytes of such a body read between pauses, and seconds of a pause: reading costs the event loop 4 ms per MiB. The
longest allowed body takes a second, so its caller gets the answer. The caller of a longer one may lose it."""

SMALL_BODY_BYTES = 64 << 10
SMALL_BODY_SECONDS = 0.05
"""Maximum bytes of an unwanted body that is read to its end, and seconds to wait for it."""

EVICTABLE = "specdec.evictable"
"""ASGI scope key set for a refused request: its connection may be evicted."""


class Bodies:
    """Receives bodies of admitted callers and accounts for the bytes in flight."""

    def __init__(self, seconds: float) -> None:
        """`seconds` is the deadline for receiving a body."""
        self._seconds = seconds
        self._free = MAX_BODIES_BYTES
        self._held: Counter[str] = Counter()  # bytes by caller
        self._receiving: Counter[str] = Counter()  # bodies by caller

    async def read(self, request: Request, caller: str) -> bytes:
        """Return the body. ApiError if it is too long, too slow or too complex, or if there is no room for it. A
        declared length is checked before any byte is read."""
        encoding = request.headers.get("content-encoding", "identity")
        if encoding != "identity":
            raise ApiError(415, f"content-encoding {encoding[:64]!r}: compressed bodies are not supported")
        declared = int(request.headers.get("content-length", 0))  # validated by h11
        _check_length(declared)
        loop = asyncio.get_running_loop()
        begun, size, parts, structure = loop.time(), 0, [], Structure()
        with self._reception(caller) as reception:
            reception.hold(declared)
            try:
                async with asyncio.timeout_at(begun + min(self._seconds, RATE_GRACE_SECONDS)) as timeout:
                    async for part in request.stream():
                        size += len(part)
                        _check_length(size)
                        reception.hold(size)
                        await structure.add(part)
                        parts.append(part)
                        patience = min(self._seconds, RATE_GRACE_SECONDS + size / MIN_BODY_RATE)
                        timeout.reschedule(begun + patience)
            except TimeoutError:
                raise self._late(loop.time() - begun) from None
        return b"".join(parts)

    def _late(self, seconds: float) -> ApiError:
        if seconds >= self._seconds:
            return ApiError(408, f"the body has not arrived within {self._seconds:g} s", code="body_late")
        return ApiError(408, f"the body arrives at less than {MIN_BODY_RATE >> 10} KiB/s", code="body_late")

    @contextmanager
    def reserved(self, caller: str, size: int) -> Iterator[None]:
        """Reserve bytes for stored data, which counts like a body; ApiError if there is no room."""
        if not size:  # no bytes needed: never fail, even if room has run out since
            yield
            return
        self.reserve(caller, size)
        try:
            yield
        finally:
            self._release(caller, size)

    @contextmanager
    def _reception(self, caller: str) -> Iterator[_Reception]:
        if self._receiving[caller] >= MAX_RECEIVING:
            raise too_many(f"the limit on concurrent bodies is reached: {MAX_RECEIVING} of yours are being received")
        self._receiving[caller] += 1
        reception = _Reception(self, caller)
        try:
            yield reception
        finally:
            self._release(caller, reception.held)
            self._receiving[caller] -= 1
            if not self._receiving[caller]:
                del self._receiving[caller]

    def reserve(self, caller: str, size: int) -> None:
        """Reserve bytes for a caller; ApiError if there is no room. The thresholds are dynamic (Choudhury and Hahne
        1998): a caller may hold at most the bytes left free. So a single caller gets half of the room, each of n
        callers 1 / (n + 1), and a further caller always finds some."""
        own = self._held[caller]
        # After the reservation the caller must hold no more than is left free.
        if own + size > self._free - size:
            if own:
                raise too_many(f"the limit on bytes in flight is reached: your requests and responses have {own}")
            raise overloaded("the limit on concurrent requests is reached")
        self._free -= size
        self._held[caller] += size

    def _release(self, caller: str, size: int) -> None:
        self._free += size
        self._held[caller] -= size
        if not self._held[caller]:
            del self._held[caller]


class _Reception:
    """The memory reserved for one body."""

    def __init__(self, bodies: Bodies, caller: str) -> None:
        self._bodies = bodies
        self._caller = caller
        self.held = 0  # bytes

    def hold(self, size: int) -> None:
        """Raise the reservation to a total of `size` bytes."""
        if size > self.held:
            self._bodies.reserve(self._caller, size - self.held)
            self.held = size


class Unread:
    """The unread rest of a request's body. `left` is True until its end was received."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        headers = Headers(scope=scope)
        declared = headers.get("content-length", "0")
        self.left = declared != "0" or "transfer-encoding" in headers
        self._is_small = 0 < int(declared) <= SMALL_BODY_BYTES  # validated by h11
        self._scope = scope
        self._receive = receive

    async def receive(self) -> Message:
        message = await self._receive()
        if not message.get("more_body"):  # also true of a disconnect
            self.left = False
        return message

    async def skip_if_small(self) -> None:
        """Read the body if it is small and arrives quickly, so that an early answer need not close the connection."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SMALL_BODY_SECONDS):
                while self.left and self._is_small:
                    await self.receive()

    async def discard(self) -> None:
        """Read the body for a while before the connection closes, so that the caller can read its answer."""
        self._scope[EVICTABLE] = True
        size = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                while self.left:
                    size += len((await self.receive()).get("body", b""))
                    if size >= LINGER_BYTES:
                        size = 0
                        await asyncio.sleep(LINGER_PAUSE_SECONDS)


def _check_length(size: int) -> None:
    if size > MAX_BODY_BYTES:
        problem = f"the body has {size} bytes or more, must have at most {MAX_BODY_BYTES}"
        raise ApiError(413, problem, code="body_too_long")
