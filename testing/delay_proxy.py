"""A proxy that adds network delay between services on one machine.

    async with DelayProxy(0.01) as proxy:
        address = await proxy.to("127.0.0.1:50051")    # like that server, 10 ms away in each direction

It forwards bytes uninterpreted and in order, `delay` seconds after their arrival, with no limit on bytes in flight:
latency grows, bandwidth does not shrink. A slow reader blocks its writer, as on any connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self, cast

HOST = "127.0.0.1"

RESET = struct.pack("ii", 1, 0)
"""Linger option (SO_LINGER) that makes closing a socket send a reset."""


@dataclass
class RelayedBytes:
    """Bytes between a server and its clients, including HTTP/2 framing."""

    to_server: int = 0
    from_server: int = 0

    def count_to(self, count: int) -> None:
        self.to_server += count

    def count_from(self, count: int) -> None:
        self.from_server += count


class DelayProxy:
    """A proxy with one listening port on this machine per server, until its context exits.

    `delay` is one-way, in seconds. It may be changed at any time, for bytes that arrive afterwards.
    """

    def __init__(self, delay: float = 0.0) -> None:
        self.delay = delay
        self.traffic: dict[str, RelayedBytes] = {}  # by server
        self.stalled = False
        self.waiting: set[End] = set()  # ends that wait for `resume`
        self._listening: list[asyncio.Server] = []
        self._ends: set[End] = set()
        self._connecting: set[asyncio.Task[None]] = set()

    @property
    def connections(self) -> int:
        """Number of open transports: two for each connection through the proxy."""
        return len(self._ends)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop listening, and reset open connections."""
        for server in self._listening:
            server.close()
        for task in self._connecting:
            task.cancel()
        self.reset()

    def carry(self, data: bytes) -> bytes:
        """Return the bytes to deliver in place of `data`: here, the same. (Tests override this with worse networks.)"""
        return data

    def reset(self) -> None:
        """Reset open connections."""
        for end in list(self._ends):
            end.abort()

    def stall(self) -> None:
        """Deliver nothing until `resume`; connections stay open."""
        self.stalled = True

    def resume(self) -> None:
        self.stalled = False
        waiting, self.waiting = self.waiting, set()
        for end in waiting:
            end.forward()

    async def to(self, server: str) -> str:
        """Return an address, HOST:PORT, that leads to the server at HOST:PORT."""
        host, port = server.rsplit(":", 1)
        traffic = self.traffic.setdefault(server, RelayedBytes())
        loop = asyncio.get_running_loop()

        def accept() -> End:
            near = End(self, self._ends, traffic.count_to)
            task = loop.create_task(connect(near))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)
            return near

        async def connect(near: End) -> None:
            try:
                _, far = await loop.create_connection(
                    lambda: End(self, self._ends, traffic.count_from), host, int(port)
                )
            except OSError:
                near.abort()
            else:
                near.join(far)

        listening = await loop.create_server(accept, HOST, 0)
        self._listening.append(listening)
        return f"{HOST}:{listening.sockets[0].getsockname()[1]}"


class End(asyncio.Protocol):
    """One of the two transports of a connection. Its events are repeated at the other end `delay` seconds later."""

    def __init__(self, proxy: DelayProxy, ends: set[End], count: Callable[[int], None]) -> None:
        self._proxy = proxy
        self._count = count  # adds to the bytes received
        self._ends = ends  # open ends
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._other: End | None = None
        self._on_the_way: deque[tuple[float, Callable[[End], None]]] = deque()  # (time due, action), in order
        self._timer: asyncio.TimerHandle | None = None
        self._heard_all = False
        self._said_all = False

    def join(self, other: End) -> None:
        """Pair this end with another as the two ends of one connection."""
        self._other, other._other = other, self
        self.forward()
        other.forward()

    # --- called for the other end -----------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def write_eof(self) -> None:
        if self._transport is not None:
            with contextlib.suppress(OSError):  # the peer has reset it: `connection_lost` follows
                self._transport.write_eof()
        self._said_all = True
        self._close_if_over()

    def abort(self) -> None:
        """Reset the connection; the peer sees RST instead of FIN."""
        if self._transport is not None and not self._transport.is_closing():
            connection = self._transport.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            self._transport.abort()

    # --- called by asyncio ------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # asyncio has already set TCP_NODELAY
        self._ends.add(self)

    def data_received(self, data: bytes) -> None:
        self._count(len(data))
        carried = self._proxy.carry(data)
        self._put(lambda other: other.write(carried))

    def eof_received(self) -> bool:
        self._put(End.write_eof)
        self._heard_all = True
        self._close_if_over()
        return True  # stay open: the other direction may have more to send

    def connection_lost(self, error: Exception | None) -> None:
        self._ends.discard(self)
        if error is not None or not self._heard_all:
            self._put(End.abort)

    def pause_writing(self) -> None:
        if self._other is not None and self._other._transport is not None:
            self._other._transport.pause_reading()

    def resume_writing(self) -> None:
        if self._other is not None and self._other._transport is not None:
            self._other._transport.resume_reading()

    # --- between the two ----------------------------------------------------------------------------------

    def _close_if_over(self) -> None:
        if self._heard_all and self._said_all and self._transport is not None:
            self._transport.close()  # bytes that this end received may still be in flight to the other

    def _put(self, action: Callable[[End], None]) -> None:
        due = self._loop.time() + self._proxy.delay
        if self._on_the_way:
            due = max(due, self._on_the_way[-1][0])  # the delay may have been reduced
        self._on_the_way.append((due, action))
        if self._timer is None:
            self.forward()

    def forward(self) -> None:
        """Forward the events that are due, and schedule a call for the rest."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._other is None:
            return  # `join` calls again
        if self._proxy.stalled:
            self._proxy.waiting.add(self)
            return  # `resume` calls again
        while self._on_the_way and self._on_the_way[0][0] <= self._loop.time():
            _, action = self._on_the_way.popleft()
            action(self._other)
        if self._on_the_way:
            self._timer = self._loop.call_at(self._on_the_way[0][0], self.forward)
