"""The response queue: a worker's responses on their way to a session's stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import grpc
from google.protobuf.message import Message

from specdec.serving.errors import ModelFailureError

MAX_WAITING = 256
"""Number of unwritten messages at which the queue is full: deferrable messages then wait until the caller reads."""

MAX_WAITING_BYTES = 16 << 20
"""Bytes of unwritten messages at which the queue is full as well, since distributions take megabytes."""

HEARTBEAT_SECONDS = 0.25
"""Seconds of silence before a heartbeat."""

BUSY_HEARTBEAT_SECONDS = 1.0
"""Seconds after which a heartbeat is due even on a busy stream, since it also reports the pod's capacity."""

Response = TypeVar("Response")


class ResponseQueue(Generic[Response]):
    """A queue filled from any thread and written to the stream in order. An exception in it ends the session."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[tuple[Response | Exception, int]] = asyncio.Queue()  # items with their bytes
        self._loop = asyncio.get_running_loop()
        self._last_append = self._loop.time()  # when an item was last appended
        self._bytes = 0  # of unwritten messages

    @property
    def full(self) -> bool:
        """True while MAX_WAITING messages or MAX_WAITING_BYTES are unwritten; deferrable messages should then wait.
        Readable from any thread."""
        return self._queue.qsize() >= MAX_WAITING or self._bytes >= MAX_WAITING_BYTES

    def send(self, item: Response | Exception) -> None:
        self._loop.call_soon_threadsafe(self._append, item)

    @staticmethod
    def send_all(items: Sequence[tuple[ResponseQueue[Any], Callable[[], Any]]]) -> None:
        """Fill many queues of one event loop in one call. The items are created on the event loop, which relieves the
        calling thread."""

        def fill() -> None:
            for responses, make in items:
                try:
                    responses._append(make())
                except Exception as error:  # it ends only this session
                    responses._append(error)

        if items:
            items[0][0]._loop.call_soon_threadsafe(fill)

    async def write_to(
        self,
        context: grpc.aio.ServicerContext[Any, Response],
        *,
        heartbeat: Callable[[], Response],
        is_last: Callable[[Response], bool] = lambda _: False,
    ) -> None:
        """Write items in order, with heartbeats in between, until the last item."""
        beat = asyncio.create_task(self._send_heartbeats(heartbeat))
        try:
            while True:
                item, size = await self._queue.get()
                if isinstance(item, FloatingPointError):  # NaN or infinite logits
                    raise ModelFailureError(str(item))
                if isinstance(item, Exception):
                    raise item
                await context.write(item)
                self._bytes -= size
                if is_last(item):
                    return
        finally:
            beat.cancel()

    def _append(self, item: Response | Exception) -> None:
        """Append an item. Runs on the event loop."""
        self._last_append = self._loop.time()
        self._put(item)

    def _put(self, item: Response | Exception) -> None:
        size = item.ByteSize() if isinstance(item, Message) else 0
        self._bytes += size
        self._queue.put_nowait((item, size))

    async def _send_heartbeats(self, heartbeat: Callable[[], Response]) -> None:
        """Send heartbeats. Other messages postpone them: otherwise 64 busy sessions would send 256 heartbeats a
        second."""
        last_heartbeat = self._loop.time()
        while True:
            await asyncio.sleep(self._last_append + HEARTBEAT_SECONDS - self._loop.time())
            now = self._loop.time()
            if now < min(self._last_append + HEARTBEAT_SECONDS, last_heartbeat + BUSY_HEARTBEAT_SECONDS):
                continue
            self._last_append = now
            if self._queue.empty():  # a waiting message serves the same purpose
                last_heartbeat = now
                self._put(heartbeat())
