"""Bytes for an HTTP/2 port: other protocols, noise, and HTTP/2 that violates its rules."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import ssl
import struct
from collections.abc import Callable

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, END_HEADERS = 0x1, 0x4

MANY = 200

Noise = Callable[[random.Random], list[bytes]]
"""Makes the pieces to send on one connection."""


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return an HTTP/2 frame (RFC 9113, section 4.1)."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def headers(**changed: str) -> bytes:
    """Return the header block of a gRPC call, each field a literal without compression (RFC 7541, section 6.2.2)."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": "/specdec.v2.VerifierService/GetStats",
        ":authority": "localhost",
        "content-type": "application/grpc",
        "te": "trailers",
    } | {name.replace("__", ":").replace("_", "-"): value for name, value in changed.items()}
    return b"".join(b"\x00" + _literal(name) + _literal(value) for name, value in fields.items())


def _literal(text: str) -> bytes:
    data = text.encode()
    if len(data) < 127:
        return bytes([len(data)]) + data
    rest, length = len(data) - 127, b"\x7f"
    while rest >= 128:
        length, rest = length + bytes([rest % 128 + 128]), rest // 128
    return length + bytes([rest]) + data


def call(stream: int, body: bytes, **changed: str) -> bytes:
    """Return a whole call: headers, and a body that may or may not be a gRPC message."""
    begun = frame(HEADERS, END_HEADERS, stream, headers(**changed))
    return begun + frame(DATA, END_STREAM, stream, body)


HELLO = PREFACE + frame(SETTINGS, 0, 0)


def nothing(generator: random.Random) -> list[bytes]:
    return []


def noise(generator: random.Random) -> list[bytes]:
    return [generator.randbytes(generator.choice((1, 24, 500, 20_000))) for _ in range(3)]


def other_protocols(generator: random.Random) -> list[bytes]:
    return [
        generator.choice(
            (
                b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
                b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\n\r\n",
                bytes.fromhex("16030100a5010000a10303") + generator.randbytes(160),  # TLS
                b"*1\r\n$4\r\nPING\r\n",
                b"SSH-2.0-OpenSSH_9.6\r\n",
            )
        )
    ]


def half_a_preface(generator: random.Random) -> list[bytes]:
    return [PREFACE[: generator.randrange(1, len(PREFACE))]]


def noise_after_the_preface(generator: random.Random) -> list[bytes]:
    return [HELLO, *noise(generator)]


def any_frames(generator: random.Random) -> list[bytes]:
    """Frames of every kind, known and unknown, with any flags, streams and payloads."""
    return [HELLO] + [
        frame(
            generator.randrange(12),
            generator.randrange(256),
            generator.choice((0, 1, 2, 3, 2**31 - 1)),
            generator.randbytes(generator.choice((0, 4, 5, 8, 100))),
        )
        for _ in range(generator.randrange(1, 12))
    ]


def half_a_frame(generator: random.Random) -> list[bytes]:
    return [HELLO, call(1, bytes(5))[: generator.randrange(1, 100)]]


def huge_frame(generator: random.Random) -> list[bytes]:
    return [HELLO, frame(DATA, 0, 1, bytes(1 << 17))]


def pings(generator: random.Random) -> list[bytes]:
    return [HELLO, frame(PING, 0, 0, bytes(8)) * MANY]


def settings(generator: random.Random) -> list[bytes]:
    """Many in a row, with values out of range."""
    values = struct.pack(">HI", generator.randrange(8), generator.choice((0, 1, 2**31, 2**32 - 1)))
    return [HELLO, frame(SETTINGS, 0, 0, values) * MANY]


def rapid_resets(generator: random.Random) -> list[bytes]:
    """Calls reset as soon as they are made (CVE-2023-44487)."""
    block = headers()
    return [HELLO] + [
        frame(HEADERS, END_HEADERS, stream, block) + frame(RST_STREAM, 0, stream, bytes(4))
        for stream in range(1, 2 * MANY, 2)
    ]


def endless_headers(generator: random.Random) -> list[bytes]:
    """Continuations without an end (CVE-2024-27316)."""
    block = headers()
    return [HELLO, frame(HEADERS, 0, 1, block), frame(CONTINUATION, 0, 1, b"\x00\x01x\x01y" * 1000) * 20]


def windows(generator: random.Random) -> list[bytes]:
    """Updates by zero, and beyond the maximum window."""
    step = struct.pack(">I", generator.choice((0, 2**31 - 1)))
    return [HELLO, call(1, bytes(5)), frame(WINDOW_UPDATE, 0, generator.choice((0, 1)), step) * 3]


def odd_headers(generator: random.Random) -> list[bytes]:
    changed = generator.choice(
        (
            {"__path": ""},
            {"__path": "/" + "p" * 3000},
            {"__method": "GET"},
            {"content_type": "text/html"},
            {"grpc_timeout": "99999999999999999S"},
            {"grpc_timeout": "-1m"},
            {"grpc_encoding": "gzip"},
            {"grpc_encoding": "\x01"},
            {"x_request_id": "h" * 7000},
            {"UPPER": "case"},
        )
    )
    return [HELLO, call(1, bytes(5), **changed)]


def odd_bodies(generator: random.Random) -> list[bytes]:
    """Invalid length-prefixed messages: inconsistent flags, lengths and bytes."""
    bodies = (
        b"",
        b"\x00",
        b"\x00\xff\xff\xff\xffabc",
        b"\x01\x00\x00\x00\x03abc",
        b"\xff\x00\x00\x00\x00",
        b"\x00\x00\x00\x00\x02\xff\xff",
        bytes(5) * 100,
    )
    return [HELLO, call(1, generator.choice(bodies)), call(3, generator.choice(bodies), grpc_encoding="gzip")]


def streams_out_of_order(generator: random.Random) -> list[bytes]:
    return [HELLO, call(5, bytes(5)), call(3, bytes(5)), call(2, bytes(5)), frame(DATA, 0, 9, b"x")]


def goodbye(generator: random.Random) -> list[bytes]:
    return [HELLO, call(1, bytes(5)), frame(GOAWAY, 0, 0, bytes(8)), call(3, bytes(5))]


def http_requests(generator: random.Random) -> list[bytes]:
    """Requests for metrics, right and wrong, several on one connection."""
    lines = (
        b"GET /metrics HTTP/1.1",
        b"GET /metrics?name[]=x&name[]=" + b"y" * 200 + b" HTTP/1.1",
        b"GET /../../etc/passwd HTTP/1.1",
        b"POST /metrics HTTP/1.1\r\nContent-Length: 1000000000",
        b"POST /metrics HTTP/1.1\r\nTransfer-Encoding: chunked",
        b"HEAD / HTTP/1.0",
        b"OPTIONS * HTTP/1.1",
        b"DELETE /metrics HTTP/9.9",
        b"GET /metrics",
        b"GET /metrics HTTP/1.1\r\nAccept: " + b"application/openmetrics-text," * 300,
        b"GET /metrics HTTP/1.1\r\nAccept-Encoding: gzip;q=\xff",
        b"G" * 70_000,
    )
    return [generator.choice(lines) + b"\r\nHost: x\r\n\r\n" for _ in range(generator.randrange(1, 5))]


def half_a_request(generator: random.Random) -> list[bytes]:
    return [b"GET /metrics HTTP/1.1\r\nHost: x\r\nX: "[: generator.randrange(1, 38)]]


def endless_request(generator: random.Random) -> list[bytes]:
    return [b"GET /metrics HTTP/1.1\r\n", *[b"X-%d: y\r\n" % number * 30 for number in range(20)]]


NOISES: tuple[Noise, ...] = (
    nothing,
    noise,
    other_protocols,
    half_a_preface,
    noise_after_the_preface,
    any_frames,
    half_a_frame,
    huge_frame,
    pings,
    settings,
    rapid_resets,
    endless_headers,
    windows,
    odd_headers,
    odd_bodies,
    streams_out_of_order,
    goodbye,
)

HTTP_NOISES: tuple[Noise, ...] = (
    nothing,
    noise,
    other_protocols,
    any_frames,
    http_requests,
    half_a_request,
    endless_request,
)
"""For the metrics port."""


async def send(
    address: str,
    pieces: list[bytes],
    generator: random.Random,
    sent: Callable[[], None],
    tls: ssl.SSLContext | None = None,
) -> str:
    """Send the pieces on a separate connection, encrypted if `tls` is given, wait briefly for a response, and leave in
    a random way; return how the connection ended."""
    host, _, port = address.rpartition(":")
    try:
        reader, writer = await asyncio.open_connection(host, int(port), ssl=tls)
    except (ssl.SSLError, ConnectionError):
        if tls is None:
            raise
        return "no handshake"
    try:
        return await _said(reader, writer, pieces, generator, sent)
    except TimeoutError:
        return "open"
    except OSError:
        return "reset there"
    finally:
        with contextlib.suppress(OSError):
            if generator.random() < 0.3:
                _leave_with_a_reset(writer)
            if tls is not None:
                writer.transport.abort()  # asyncio leaks the connection if the peer does not answer close_notify
            writer.close()
            await writer.wait_closed()


async def _said(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    pieces: list[bytes],
    generator: random.Random,
    sent: Callable[[], None],
) -> str:
    for piece in pieces:
        writer.write(piece)
        sent()
        await asyncio.wait_for(writer.drain(), 1.0)
    if generator.random() < 0.3 and writer.can_write_eof():  # not supported by TLS
        writer.write_eof()
    async with asyncio.timeout(generator.choice((0.01, 0.1, 0.3))):
        while await reader.read(1 << 16):
            pass
    return "closed there"


def _leave_with_a_reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST instead of FIN."""
    if (held := writer.get_extra_info("socket")) is not None:  # otherwise the peer closed first
        held.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
