"""Slow, broken or excessive connections do no harm; certificates are replaced at run time."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import re
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import typer
from starlette.types import Receive, Scope, Send

from specdec.openai_api import bodies, http_server
from specdec.openai_api.http_server import HttpServer, ServerTls
from specdec.openai_api.origins import origin
from specdec.serving.process.listening import bound
from specdec.wire.tls_files import TlsError, TlsFiles
from tests.captured_logs import captured_logs
from tests.certificates import Authority
from tests.client.fake_server import Act, FakeServer
from tests.openai_api.front import front
from tests.stack import until

ASKED = b'{"model": "fake", "prompt": "def"}'


def post(body: bytes, length: int | None = None, headers: bytes = b"") -> bytes:
    return (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
        + headers
        + f"content-length: {len(body) if length is None else length}\r\n\r\n".encode()
        + body
    )


async def answered(address: str, request: bytes) -> bytes:
    """Return the answer to a request, and then close the connection. The server may keep a refused one open for a
    while."""
    host, _, port = address.partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    try:
        async with asyncio.timeout(20):
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"\r\ncontent-length: (\d+)\r\n", head)
            assert length is not None, head
            return head + await reader.readexactly(int(length[1]))
    finally:
        writer.transport.abort()


async def told(address: str, request: bytes) -> bytes:
    """Return everything received until the connection is closed."""
    host, _, port = address.partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    try:
        return await asyncio.wait_for(reader.read(), 20)
    finally:
        writer.close()


@asynccontextmanager
async def serving(app: Any, **options: Any) -> AsyncIterator[HttpServer]:
    server = HttpServer(app, bound("127.0.0.1", 0), **options)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


async def hello(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
    await send({"type": "http.response.body", "body": b"hello"})


@pytest.mark.parametrize("begun", [b"", b"GET /v1/mod", b"GET / HTTP/1.1\r\nhost: x\r\n"])
@pytest.mark.parametrize("requests", [0, 1])
async def test_headers_that_do_not_come_end_the_connection(requests: int, begun: bytes) -> None:
    """This holds for a connection's first request and for later ones. Between requests, an idle connection may wait
    longer."""
    async with serving(hello, header_seconds=0.2) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        for _ in range(requests):
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            await reader.readuntil(b"hello")
        if begun or not requests:
            writer.write(begun)
            await asyncio.wait_for(reader.read(), 10)
        writer.close()


async def test_a_body_that_does_not_come_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "LINGER_SECONDS", 0.2)
    async with FakeServer() as orchestrator, front(orchestrator.address, body_seconds=0.2) as http:
        answer = await told(http.address, post(ASKED, length=1000))
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"the body has not arrived within 0.2 s" in answer
        await until(lambda: http.app.running == 0)
    assert not orchestrator.calls


async def test_a_caller_who_reads_nothing_is_given_up() -> None:
    ended = asyncio.Event()

    async def endless(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while (await asyncio.wait_for(_sent(send, receive), 30)) != "http.disconnect":
                pass
        finally:
            ended.set()

    async def _sent(send: Send, receive: Receive) -> str:
        left = asyncio.ensure_future(_left(receive))
        sending = asyncio.ensure_future(send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True}))
        await asyncio.wait({left, sending}, return_when=asyncio.FIRST_COMPLETED)
        sending.cancel()
        left.cancel()
        return "http.disconnect" if left.done() and not left.cancelled() else "more"

    async def _left(receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async with serving(endless, unread_seconds=0.3) as server:
        caller = socket.create_connection(("127.0.0.1", server.port))
        with caller:
            caller.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            await asyncio.wait_for(ended.wait(), 20)


async def test_a_connection_stays_open_between_requests_for_as_long_as_is_said() -> None:
    async with serving(hello, keep_alive_seconds=1) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        for _ in range(2):
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            await reader.readuntil(b"hello")
        assert await asyncio.wait_for(reader.read(), 20) == b""
        writer.close()


@pytest.mark.parametrize(("origin", "allowed"), [("https://a.example", True), ("https://b.example", False)])
async def test_pages_of_some_origins_may_ask(origin: str, allowed: bool) -> None:
    async with FakeServer() as orchestrator, front(orchestrator.address, origins=["https://a.example"]) as http:
        preflight = f"OPTIONS /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\norigin: {origin}\r\n"
        preflight += "access-control-request-method: POST\r\naccess-control-request-headers: authorization\r\n\r\n"
        answer = await told(http.address, preflight.encode())
    assert answer.startswith(b"HTTP/1.1 200 ") is allowed
    assert (b"access-control-allow-origin: https://a.example" in answer) is allowed


async def test_pages_may_read_the_headers_that_are_told() -> None:
    async with FakeServer() as orchestrator, front(orchestrator.address, origins=["https://a.example"]) as http:
        request = b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\norigin: https://a.example\r\n\r\n"
        answer = await told(http.address, request)
    assert b"access-control-expose-headers: x-request-id, retry-after" in answer


async def test_pages_may_read_that_the_server_is_at_fault() -> None:
    def fails() -> bytes:
        raise RuntimeError

    async with (
        FakeServer() as orchestrator,
        front(orchestrator.address, origins=["https://a.example"], metrics=fails) as http,
    ):
        request = b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\norigin: https://a.example\r\n\r\n"
        answer = await told(http.address, request)
    assert answer.startswith(b"HTTP/1.1 500 ")
    assert b"access-control-allow-origin: https://a.example" in answer


@pytest.mark.parametrize("text", ["*", "https://a.example", "http://localhost:3000", "https://[::1]:8000", "app://x"])
def test_an_origin_is_taken(text: str) -> None:
    assert origin(text) == text


@pytest.mark.parametrize(
    "text", ["https://a.example/", "https://a.example/chat", "a.example", "https://A.example", "", "https://a b", "**"]
)
def test_what_no_browser_sends_as_its_origin_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="an origin is"):
        origin(text)


async def test_what_a_drain_cuts_off_is_told_to_ask_elsewhere() -> None:
    async with (
        FakeServer(Act(tokens=0, then="hold")) as orchestrator,
        front(orchestrator.address, origins=["https://a.example"]) as http,
    ):
        host, _, port = http.address.partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(post(ASKED, headers=b"origin: https://a.example\r\n"))
        await asyncio.wait_for(orchestrator.held.wait(), 10)
        await http.server.stop()
        answer = await asyncio.wait_for(reader.read(), 10)
        writer.close()
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"use another one" in answer
    assert b"access-control-allow-origin: https://a.example" in answer


@pytest.mark.parametrize(
    ("path", "body", "events"),
    [
        (
            "/v1/completions",
            {"model": "fake", "prompt": "def"},
            [b'data: {"error":{"message":"the server is shutting down: use another one"', b"data: [DONE]"],
        ),
        (
            "/v1/messages",
            {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9},
            [b"event: error\n", b"the server is shutting down: use another one"],
        ),
    ],
)
async def test_a_stream_that_a_drain_cuts_off_ends_with_an_error_event(
    path: str, body: dict[str, Any], events: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    async with FakeServer(Act(tokens=3, then="hold")) as orchestrator, front(orchestrator.address) as http:
        host, _, port = http.address.partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        content = json.dumps(body | {"stream": True}).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
        writer.write(head.encode() + content)
        await asyncio.wait_for(orchestrator.held.wait(), 10)
        with caplog.at_level(logging.WARNING):
            await http.server.stop()
        answer = await asyncio.wait_for(reader.read(), 10)
        writer.close()
    assert answer.startswith(b"HTTP/1.1 200 ")
    for event in events:
        assert event in answer
    assert not [record for record in caplog.records if record.name == "uvicorn.error"]
    assert answer.endswith(b"\r\n0\r\n\r\n")  # the last chunk: the answer is complete


async def test_a_compressed_body_is_refused_as_such() -> None:
    async with FakeServer() as orchestrator, front(orchestrator.address) as http:
        answer = await answered(http.address, post(gzip.compress(ASKED), headers=b"content-encoding: gzip\r\n"))
    assert answer.startswith(b"HTTP/1.1 415")
    assert b"content-encoding 'gzip': compressed bodies are not supported" in answer


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"GET /v1/nothing", b"404"),
        (b"GET /v1/completions", b"405"),
        (b"DELETE /v1/models", b"405"),
        (b"GET /", b"404"),
        (b"POST /v1/completions", b"400"),
    ],
)
async def test_what_is_not_served_is_told_in_openais_shape(request_line: bytes, status: bytes) -> None:
    async with FakeServer() as orchestrator, front(orchestrator.address) as http:
        request = request_line + b" HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        answer = await told(http.address, request)
    assert answer.startswith(b"HTTP/1.1 " + status)
    assert b'{"error":{"message":' in answer


@pytest.mark.parametrize("serves", [True, False])
async def test_health_is_an_orchestrators(serves: bool) -> None:
    async with front("127.0.0.1:1", serves=serves) as http:
        answer = await told(http.address, b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200" if serves else b"HTTP/1.1 503")


async def test_requests_are_counted_by_route_and_status() -> None:
    async with FakeServer() as orchestrator, front(orchestrator.address) as http:
        await http.client.models.list()
        await told(http.address, b"GET /v1/x HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        (requests,) = [each for each in http.app.metrics() if each.name == "specdec_openai_requests"]
    found = {(each.labels["route"], each.labels["status"]): each.value for each in requests.samples}
    assert found == {("/v1/models", "200"): 1.0, ("other", "404"): 1.0}


async def test_probes_and_scrapes_are_not_timed() -> None:
    """There may be more of them than requests, and they are answered at once."""
    async with front("127.0.0.1:1") as http:
        for path in (b"/health", b"/ping", b"/live", b"/metrics", b"/other"):
            await told(http.address, b"GET " + path + b" HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        found = {sample.name: sample.value for metric in http.app.metrics() for sample in metric.samples}
    assert found["specdec_openai_request_seconds_count"] == 1
    assert found["specdec_openai_time_to_first_byte_seconds_count"] == 1


async def test_a_certificate_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """New connections see the new certificate; invalid files change nothing."""
    monkeypatch.setattr(http_server, "RELOAD_SECONDS", 0.02)
    authority = Authority(tmp_path / "authority")
    certificate, key = authority.issue("server")
    trusting = ssl.create_default_context(cafile=str(authority.file))

    async def seen(port: int) -> bytes:
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting)
        try:
            return bytes(writer.get_extra_info("ssl_object").getpeercert(binary_form=True))
        finally:
            writer.close()

    async with serving(hello, tls=ServerTls(TlsFiles(certificate, key, None))) as server:
        first = await seen(server.port)
        with captured_logs() as lines:
            key.write_text("nonsense")
            await until(lambda: "files_refused" in [line["event"] for line in lines])
        assert await seen(server.port) == first
        authority.issue("server")
        async with asyncio.timeout(10):
            while await seen(server.port) == first:
                await asyncio.sleep(0.02)


async def greeted(port: int, trusting: ssl.SSLContext) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting)
    try:
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await reader.readuntil(b"hello")
    finally:
        writer.close()


async def test_clients_without_a_certificate_are_kept_out(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    certificate, key = authority.issue("server")
    trusting = ssl.create_default_context(cafile=str(authority.file))
    async with serving(hello, tls=ServerTls(TlsFiles(certificate, key, authority.file))) as server:
        with pytest.raises((ssl.SSLError, ConnectionError, asyncio.IncompleteReadError)):
            await greeted(server.port, trusting)
        trusting.load_cert_chain(*authority.issue("client"))
        await greeted(server.port, trusting)


def test_authorities_alone_are_no_certificate(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    with pytest.raises(TlsError, match="--tls-client-ca is given, --tls-cert and --tls-key are missing"):
        ServerTls(TlsFiles(None, None, authority.file))
