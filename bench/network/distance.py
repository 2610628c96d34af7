"""The distance between services: a delay of their links, set and measured."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator

from testing.delay_process import DelayProcess

PINGS = 40


class Distance:
    def __init__(self, proxy: DelayProcess, echo: str, step: float) -> None:
        self._proxy = proxy
        self._echo = echo
        self._step = step

    def set(self, steps: float) -> None:
        """Set the round trip of a link, in target steps."""
        self._proxy.delay(steps * self._step / 2)

    async def measured(self) -> float:
        """Return the median seconds of a round trip, the proxy's own work included."""
        host, port = self._echo.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        seconds = []
        for _ in range(PINGS):
            begin = time.perf_counter()
            writer.write(b"x")
            await reader.readexactly(1)
            seconds.append(time.perf_counter() - begin)
        writer.close()
        return statistics.median(seconds)


@contextlib.asynccontextmanager
async def echoing() -> AsyncIterator[str]:
    """Yield the address of an echo server."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(64):
            writer.write(data)
        writer.close()

    async with await asyncio.start_server(echo, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        yield f"{host}:{port}"
