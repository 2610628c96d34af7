"""Idle connections give way to new ones, and headers are limited before parsing."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from specdec.openai_api import connections
from specdec.openai_api.callers import network_of
from specdec.openai_api.connections import HttpConnection
from specdec.openai_api.errors import overloaded
from tests.client.fake_server import Act, FakeServer
from tests.openai_api.front import Front, front
from tests.openai_api.test_http_server import ASKED, hello, post, serving, told
from tests.openai_api.ticking import Ticking
from tests.stack import until

HOLD = Act(tokens=0, then="hold")
GET = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n"


@asynccontextmanager
async def connected(
    address: str, number: int, sent: bytes = b"", answer: bytes = b"", source: str = "127.0.0.1"
) -> AsyncIterator[list[tuple[StreamReader, StreamWriter]]]:
    """Open `number` connections from the address `source`; send `sent` on each and wait for `answer`, if given."""
    host, _, port = address.partition(":")
    opened = []
    try:
        for _ in range(number):
            reader, writer = await asyncio.open_connection(host, int(port), local_addr=(source, 0))
            opened.append((reader, writer))
            writer.write(sent)
            if answer:
                await asyncio.wait_for(reader.readuntil(answer), 20)
        yield opened
    finally:
        for _, writer in opened:
            writer.close()


async def status(address: str, request: bytes) -> int:
    answer = await told(address, request + b"connection: close\r\n\r\n")
    return int(answer.split()[1])


async def closed(opened: list[tuple[StreamReader, StreamWriter]]) -> list[bool]:
    """Return for each connection whether the server closed it without sending data."""
    found = await asyncio.gather(
        *(asyncio.wait_for(reader.read(), 0.2) for reader, _ in opened), return_exceptions=True
    )
    return [each == b"" for each in found]


async def test_the_oldest_idle_connection_gives_way() -> None:
    async with (
        FakeServer() as orchestrator,
        front(orchestrator.address, most_connections=4) as http,
        connected(http.address, 4, GET + b"\r\n", b"]}") as idle,
    ):
        assert await status(http.address, GET) == 200
        assert await closed(idle) == [True, False, False, False]


async def test_connections_without_a_request_give_way_after_a_while() -> None:
    async with (
        FakeServer() as orchestrator,
        front(orchestrator.address, most_connections=4) as http,
        connected(http.address, 4, b"GET /v1/mod"),
    ):
        async with asyncio.timeout(20):
            while await status(http.address, GET) != 200:
                await asyncio.sleep(0.02)


async def test_idle_connections_of_the_busiest_address_give_way_first() -> None:
    async with (
        FakeServer() as orchestrator,
        front(orchestrator.address, most_connections=4) as http,
        connected(http.address, 1, GET + b"\r\n", b"]}") as few,
        connected(http.address, 3, GET + b"\r\n", b"]}", source="127.0.0.2") as many,
    ):
        assert await status(http.address, GET) == 200
        assert await closed(few) == [False]
        assert await closed(many) == [True, False, False]


def counted(http: Front) -> dict[str, float]:
    """Return the numbers of ended requests by status."""
    (requests,) = [metric for metric in http.app.metrics() if metric.name == "specdec_openai_requests"]
    return {sample.labels["status"]: sample.value for sample in requests.samples}


async def test_connections_with_a_request_never_give_way() -> None:
    """If all are busy, a new connection is answered 503, except for /health, which probes request."""
    health = b"GET /health HTTP/1.1\r\nhost: x\r\n"
    async with (
        FakeServer(HOLD, HOLD) as orchestrator,
        front(orchestrator.address, most_connections=2) as http,
        connected(http.address, 1, post(ASKED)) as working,
        connected(http.address, 1, post(ASKED, headers=b"authorization: Bearer b\r\n"), source="127.0.0.2") as others,
    ):
        await until(lambda: len(orchestrator.calls) == 2)
        answer = await told(http.address, GET + b"\r\n")
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2]) == overloaded("too many connections").body
        answer = await told(http.address, health + b"\r\n" + GET + b"\r\n")
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert answer.count(b"HTTP/1.1") == 1  # and nothing after it
        await until(lambda: http.app.running == 2)
        assert counted(http) == {"503": 1, "200": 1}
        assert await closed([*working, *others]) == [False, False]


async def test_connections_far_above_the_limit_are_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_HEALTH_ONLY", 0)
    async with (
        FakeServer(HOLD) as orchestrator,
        front(orchestrator.address, most_connections=1) as http,
        connected(http.address, 1, post(ASKED)),
    ):
        await until(lambda: len(orchestrator.calls) == 1)
        assert (await told(http.address, b"")).startswith(b"HTTP/1.1 503 ")
        assert counted(http) == {"503": 1}


LINE = b"GET / HTTP/1.1\r\nhost: x\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
LONG, MANY = b"a: " + b"x" * 100_000 + b"\r\n\r\n", b"a: b\r\n" * 1000 + b"\r\n"
BACKTRACKS = b"a:" + b" " * 30_000 + b"\x00\r\n\r\n"


@pytest.mark.parametrize(
    "before", [b"", LINE + b"\r\n", CHUNKED + b"2\r\nab\r\n0\r\n\r\n"], ids=["first", "next", "chunks"]
)
@pytest.mark.parametrize(
    ("request_", "wanted", "problem"),
    [
        (LINE + LONG, 431, b"have more than 32768 bytes"),
        (LINE + LONG[:50_000], 431, b"have more than 32768 bytes"),  # unterminated
        (b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n", 431, b"have more than 32768 bytes"),
        (LINE + MANY, 431, b"have more than 256 lines"),
        (LINE + BACKTRACKS, 400, b"control character"),
        (LINE + b"a: b\r\n c\r\n\r\n", 400, b"a folded line"),
        (b"\x16\x03\x01\x02\x00", 400, b"not valid HTTP"),
        (b"nonsense\r\n\r\n", 400, b"not valid HTTP"),
    ],
    ids=["long", "endless", "target", "many", "backtracks", "folded", "tls", "nonsense"],
)
async def test_headers_beyond_the_limits_are_refused(
    request_: bytes, wanted: int, problem: bytes, before: bytes
) -> None:
    async with serving(hello) as server:
        answer = await told(f"127.0.0.1:{server.port}", before + request_)
    if before.startswith(CHUNKED):  # nothing is read after a chunked body
        assert answer.count(b"HTTP/1.1") <= 2
        return
    last = answer[answer.rindex(b"HTTP/1.1") :]
    assert last.startswith(b"HTTP/1.1 %d " % wanted)
    assert json.loads(last.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"
    assert problem in last
    assert answer.count(b"HTTP/1.1") == 1 + bool(before)


@pytest.mark.parametrize(
    ("request_", "wanted"),
    [
        (LINE + MANY, "431"),
        (b"nonsense\r\n\r\n", "400"),
        (CHUNKED.replace(b"/ ", b"/v1/completions ", 1) + b"no size of a chunk\r\n", "400"),
    ],
    ids=["many", "nonsense", "chunk"],
)
async def test_refused_requests_are_counted(request_: bytes, wanted: str) -> None:
    async with FakeServer() as orchestrator, front(orchestrator.address) as http:
        answer = await told(http.address, request_)
        assert answer.startswith(b"HTTP/1.1 " + wanted.encode())
        await until(lambda: http.app.running == 0)
        assert counted(http) == {wanted: 1}


async def test_an_invalid_chunk_before_a_reset_is_no_mistake_of_the_server() -> None:
    """The answer 404 has begun, so none is written about the chunk; the reset is noticed when the 404 answer ends."""
    mistakes: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: mistakes.append(context))
    async with FakeServer() as orchestrator, front(orchestrator.address) as http:
        host, _, port = http.address.partition(":")
        with socket.socket() as caller:
            caller.setblocking(False)
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing resets
            await loop.sock_connect(caller, (host, int(port)))
            await loop.sock_sendall(caller, CHUNKED.replace(b"/ ", b"/nowhere ", 1) + b"5\r\n")
            assert b" 404 " in await asyncio.wait_for(loop.sock_recv(caller, 1000), 20)
            # More than is parsed in one turn, so that the rest is parsed in a later callback.
            chunks = b"1\r\nx\r\n" * (connections.PIECES_A_TURN * connections.PIECE_BYTES // 4)
            caller.send(b"hello\r\n" + chunks + b"no size of a chunk\r\n")
        assert await status(http.address, GET) == 200
    assert mistakes == []


@pytest.mark.parametrize(
    "sent",
    [
        LINE + BACKTRACKS,
        CHUNKED + b"0\r\n" + BACKTRACKS,
        pytest.param(CHUNKED + b"1\r\nx\r\n" * 40_000, marks=pytest.mark.verify),
    ],
)
async def test_few_bytes_do_not_hold_the_event_loop(sent: bytes) -> None:
    """h11 takes seconds for headers and trailers with many blanks before a possibly missing byte."""
    async with serving(hello) as server, Ticking() as ticking:
        await told(f"127.0.0.1:{server.port}", sent)
    assert ticking.longest < 0.5


class Transport(asyncio.Transport):
    """A transport that records whether reading is paused."""

    paused = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": ("10.1.2.3", 5), "sockname": ("10.1.2.4", 80)}.get(name, default)

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Discard the answer."""

    def close(self) -> None:
        """Stay open."""

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_that_the_application_does_not_read_is_not_kept(chunked: bool) -> None:
    called, admitted = asyncio.Event(), asyncio.Event()
    size, sent, received = 1 << 20, 0, 0

    async def app(_: Scope, receive: Receive, send: Send) -> None:
        nonlocal received
        called.set()
        await admitted.wait()  # a check of the key
        while received < size:
            received += len((await receive())["body"])
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": b""})

    config = uvicorn.Config(app, ws="none", lifespan="off", h11_max_incomplete_event_size=32 << 10)
    config.load()
    connection = HttpConnection(
        config=config,
        server_state=ServerState(),
        app_state={},
        _loop=asyncio.get_running_loop(),
        header_seconds=10.0,
        connections=connections.Connections(10),
    )
    transport = Transport()
    connection.connection_made(transport)
    connection.data_received(
        CHUNKED if chunked else b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000000\r\n\r\n"
    )
    await called.wait()

    async def fill() -> None:
        nonlocal sent
        while sent < size and not transport.paused:
            data = b"x" * (32 << 10)
            connection.data_received(b"%x\r\n%s\r\n" % (len(data), data) if chunked else data)
            sent += len(data)
            while connection._next_piece is not None:
                await asyncio.sleep(0)

    await fill()
    assert transport.paused
    assert len(connection.cycle.body) < 512 << 10
    admitted.set()
    async with asyncio.timeout(20):
        while received < size:
            await fill()
            await asyncio.sleep(0)
    connection.connection_lost(None)


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("10.1.2.3", "10.1.2.3"),
        ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("::ffff:10.1.2.3", "::ffff:10.1.2.3"),
        ("", ""),
    ],
)
def test_a_network_is_what_one_site_has(host: str, network: str) -> None:
    assert network_of(host) == network
