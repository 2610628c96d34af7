"""A mismatch between client and server is reported in one plain sentence, by the client and by commands."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from specdec.client import AsyncClient, Unavailable
from specdec.serving.tls import server_credentials
from specdec.v2.generation_pb2_grpc import add_GenerationServiceServicer_to_server
from specdec.wire.tls_files import TlsFiles, channel_credentials
from tests.certificates import Authority
from tests.client.fake_server import FakeServer

NO_TLS = "the server does not speak TLS"
TLS = "the server closes new connections: perhaps it requires TLS (`credentials`; --tls-ca, --tls)"
OTHER_AUTHORITY = "the server's certificate is not signed by an authority that this client trusts"
OTHER_NAME = "the server's certificate is for another name than its address"
HTTP = "this is another kind of server, perhaps the HTTP one of `specdec openai`"


@asynccontextmanager
async def secured(files: TlsFiles) -> AsyncIterator[str]:
    """Yield the address of a server with these TLS files."""
    server = grpc.aio.server()
    add_GenerationServiceServicer_to_server(FakeServer(), server)
    port = server.add_secure_port("127.0.0.1:0", server_credentials(files))
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


@asynccontextmanager
async def http_server() -> AsyncIterator[str]:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    yield f"{host}:{port}"
    server.close()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


def trusting(authority: Authority) -> grpc.ChannelCredentials:
    return channel_credentials(TlsFiles(None, None, authority.file).read())


async def problem(address: str, credentials: grpc.ChannelCredentials | None) -> str:
    async with AsyncClient(address, credentials=credentials, max_retries=0, timeout=20) as client:
        with pytest.raises(Unavailable) as told:
            await client.models()
    return str(told.value)


async def test_a_client_with_tls_at_a_server_without(authority: Authority) -> None:
    async with FakeServer() as server:
        assert await problem(server.address, trusting(authority)) == (
            f"{server.address}: {NO_TLS}: leave out `credentials` (--tls, --tls-ca)"
        )


async def test_a_client_without_tls_at_a_server_with(authority: Authority) -> None:
    async with secured(TlsFiles(*authority.issue("server"), None)) as address:
        assert (await problem(address, None)).startswith(f"{address}: {TLS}")


async def test_a_server_that_wants_a_certificate(authority: Authority) -> None:
    async with secured(authority.files("server")) as address:
        assert "or also a client certificate (in `credentials`; --tls-cert)" in await problem(
            address, trusting(authority)
        )


async def test_a_server_of_another_authority(authority: Authority, tmp_path: Path) -> None:
    async with secured(TlsFiles(*authority.issue("server"), None)) as address:
        told = await problem(address, trusting(Authority(tmp_path / "other")))
    assert told.startswith(f"{address}: {OTHER_AUTHORITY}")


async def test_a_certificate_for_another_name(authority: Authority) -> None:
    async with secured(TlsFiles(*authority.issue("server", "example.org"), None)) as address:
        assert (await problem(address, trusting(authority))).startswith(f"{address}: {OTHER_NAME}")


async def test_an_http_server() -> None:
    async with http_server() as address:
        assert (await problem(address, None)).startswith(f"{address}: {HTTP}")


async def command(*arguments: str | Path) -> list[str]:
    """Run a command that fails for the server; return its lines on stderr."""
    program = (sys.executable, "-m", "specdec.cli", *map(str, arguments))
    process = await asyncio.create_subprocess_exec(*program, stdout=-1, stderr=-1)
    _, complained = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 69
    return complained.decode().splitlines()


async def test_commands_say_it_in_a_line_and_grpc_says_nothing(authority: Authority) -> None:
    async with FakeServer() as server:
        (line,), said = await asyncio.gather(
            command("stats", server.address, "--tls-ca", authority.file),
            command("generate", "hi", "--address", server.address, "--tls-ca", authority.file),
        )
    assert line.startswith(f"specdec: {server.address}: {NO_TLS}")
    assert said
    assert all(line.startswith(f"specdec: {server.address}: {NO_TLS}") for line in said)
