"""An attacker on the HTTP server without an API key: it holds request bodies and idle connections.

Run beside callers with keys, who must notice nothing:

    async with KeylessHttp(address, held=8, idle=1100, seconds=60.0) as attacker:
        ...
    print(attacker.report())

or, to measure latencies of other callers, as its own process, until its stdin is closed:

    python -m tests.hostile.keyless_http HOST:PORT HELD IDLE SECONDS
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
import time
from asyncio import StreamReader, StreamWriter
from collections import Counter
from typing import Self

HELD_BYTES = (8 << 20) - 1
"""Bytes sent of a body of 8 MiB, the longest accepted."""

PIECE = b" " * (64 << 10)

PATIENCE_SECONDS = 30.0
"""Seconds for which a held body waits for an answer."""

PAUSE_SECONDS = 0.5
"""Seconds before an ended connection is replaced: the attack holds connections, and does not flood with new ones."""

REQUESTS = (
    b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n",
    b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n",
    b"GET /v1/mod",  # unfinished headers
    b"",
)
"""Bytes sent by idle connections before they fall idle."""

STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")


class KeylessHttp:
    """Attacks an address during its context, for at most `seconds`. Every ended connection is replaced."""

    def __init__(self, address: str, *, held: int, idle: int, seconds: float, source: str = "127.0.0.1") -> None:
        """Hold `held` bodies and `idle` connections at a time, from the address `source`."""
        self._host, _, port = address.partition(":")
        self._port = int(port)
        self._held = held
        self._idle = idle
        self._seconds = seconds
        self._source = source
        self._attack: asyncio.Task[None] | None = None
        self.requests = 0  # begun, with a body
        self.connections = 0  # idle ones opened
        self.statuses: Counter[int | str] = Counter()  # of requests with a body

    async def __aenter__(self) -> Self:
        self._attack = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._attack is not None
        self._attack.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._attack

    def report(self) -> str:
        found = ", ".join(f"{status}: {number}" for status, number in sorted(self.statuses.items(), key=str))
        return f"{self.requests} requests with held bodies ({found}), {self.connections} idle connections"

    async def _run(self) -> None:
        end = time.monotonic() + self._seconds
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._seconds), asyncio.TaskGroup() as group:
                for _ in range(self._held):
                    group.create_task(self._again(end, self._hold))
                for number in range(self._idle):
                    group.create_task(
                        self._again(end, lambda number=number: self._stay(REQUESTS[number % len(REQUESTS)]))
                    )

    async def _again(self, end: float, attack: object) -> None:
        assert callable(attack)
        while time.monotonic() < end:
            with contextlib.suppress(OSError):
                await attack()
            await asyncio.sleep(PAUSE_SECONDS)

    async def _hold(self) -> None:
        """Send a body except for its last byte, and wait for the answer."""
        reader, writer = await self._connected()
        reading = asyncio.create_task(reader.read())
        self.requests += 1
        try:
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (HELD_BYTES + 1))
            left = HELD_BYTES
            while left and not reading.done():
                writer.write(PIECE[:left])
                left -= min(left, len(PIECE))
                await writer.drain()
            async with asyncio.timeout(PATIENCE_SECONDS):
                answer = await reading
        except (OSError, TimeoutError):
            answer = b""
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            writer.transport.abort()
        found = STATUS.match(answer)
        self.statuses[int(found[1]) if found else "closed"] += 1

    async def _stay(self, request: bytes) -> None:
        """Open a connection and stay until the server closes it."""
        reader, writer = await self._connected()
        self.connections += 1
        try:
            writer.write(request)
            while await reader.read(4096):
                pass
        finally:
            writer.transport.abort()

    async def _connected(self) -> tuple[StreamReader, StreamWriter]:
        return await asyncio.open_connection(self._host, self._port, local_addr=(self._source, 0))


async def main(address: str, held: int, idle: int, seconds: float) -> None:
    async with KeylessHttp(address, held=held, idle=idle, seconds=seconds) as attacker:
        await asyncio.to_thread(sys.stdin.read)
    print(attacker.report())


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])))
