"""A caller without a key on raw HTTP/2: calls that are refused, and calls that are reset immediately.

As a program it makes one kind of call for a while, at a bounded rate, and reconnects whenever a connection is closed:

    python -m tests.hostile.keyless_grpc 127.0.0.1:50050 whole --rate 4000 --seconds 60
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import struct
import time
from dataclasses import dataclass
from typing import Self

from tests.hostile.raw_bytes import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    HELLO,
    RST_STREAM,
    SETTINGS,
    frame,
    headers,
)

ACK = 0x1
CANCEL = struct.pack(">I", 8)
COMPLETE = "/specdec.v2.GenerationService/Complete"
KINDS = ("whole", "reset")
"""Calls refused for lack of a key, and calls reset as soon as they are made."""

TICK_SECONDS = 0.002
MAX_UNREAD_BYTES = 1 << 20
STUCK_SECONDS = 0.5
"""Seconds of silence after which the attacker opens another connection."""

MAX_AT_ONCE = 200
"""Maximum calls in one write, so that a machine that falls behind does not make unbounded bursts."""


class RawConnection:
    """A caller's HTTP/2 connection, as a context manager."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._stream = 1
        self.closed = asyncio.Event()

    async def __aenter__(self) -> Self:
        host, _, port = self._address.rpartition(":")
        self._reader, self._writer = await asyncio.open_connection(host, int(port))
        self.heard_at = time.monotonic()
        self._reading = asyncio.create_task(self._read())
        self._writer.write(HELLO + frame(SETTINGS, ACK, 0))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._reading.cancel()
        self._writer.transport.abort()
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await self._reading

    async def _read(self) -> None:
        with contextlib.suppress(OSError):
            while await self._reader.read(1 << 16):
                self.heard_at = time.monotonic()
        self.closed.set()

    def send(self, kind: str, count: int, path: str = COMPLETE, key: str = "nonsense") -> int:
        """Send calls of a kind; return their number. Send none while the server leaves too much unread, since its
        kernel may drop data for a closed connection and stay silent for a minute and a half."""
        if self._writer.transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            return 0
        block = headers(__path=path, authorization=f"Bearer {key}")
        sent = bytearray()
        for _ in range(count):
            sent += frame(HEADERS, END_HEADERS, self._stream, block)
            if kind == "reset":
                sent += frame(RST_STREAM, 0, self._stream, CANCEL)
            else:
                sent += frame(DATA, END_STREAM, self._stream, bytes(5))
            self._stream += 2
        self._writer.write(sent)
        return count


@dataclass
class Attack:
    calls: int = 0
    connections: int = 0


async def attack(address: str, kind: str, rate: float, seconds: float, path: str = COMPLETE) -> Attack:
    """Make calls of a kind at a rate per second, on one connection after the other, each until it is closed."""
    done, begun = Attack(), time.monotonic()
    while time.monotonic() - begun < seconds:
        with contextlib.suppress(OSError):
            async with RawConnection(address) as connection:
                done.connections += 1
                while not connection.closed.is_set() and (passed := time.monotonic() - begun) < seconds:
                    if time.monotonic() - connection.heard_at > STUCK_SECONDS:
                        break
                    if due := min(int(rate * passed) - done.calls, MAX_AT_ONCE):
                        done.calls += connection.send(kind, due, path)
                    await asyncio.sleep(TICK_SECONDS)
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--rate", type=float, required=True, help="calls a second")
    parser.add_argument("--seconds", type=float, required=True)
    given = parser.parse_args()
    done = asyncio.run(attack(given.address, given.kind, given.rate, given.seconds))
    print(json.dumps({"calls": done.calls, "connections": done.connections}))


if __name__ == "__main__":
    main()
