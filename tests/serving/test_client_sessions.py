"""Limits on the sessions of one client over all its connections; other clients have their own limits."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from specdec.serving.client_sessions import ClientSessions, client_of
from specdec.serving.interceptor import CallInterceptor
from specdec.serving.mux.channel import MuxChannel
from specdec.serving.process.server import registered
from specdec.serving.tls import server_credentials
from specdec.wire.tls_files import TlsFiles, channel_credentials
from tests.certificates import Authority

SERVICE = "tests.Sessions"


class Sessions:
    """A service whose one method holds a session until its caller leaves."""

    name = SERVICE

    def __init__(self, most: int | None) -> None:
        self.sessions = ClientSessions(most)

    def register(self, server: Any) -> None:
        methods = {"hold": grpc.stream_stream_rpc_method_handler(self.hold, bytes, bytes)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
        server.add_registered_method_handlers(SERVICE, methods)

    async def close(self) -> None:
        pass

    async def hold(self, requests: AsyncIterator[bytes], context: Any) -> None:
        with self.sessions.session(context):
            async for _ in requests:
                await context.write(b"open")


@asynccontextmanager
async def serving(most: int | None, files: TlsFiles | None = None) -> AsyncIterator[str]:
    server = grpc.aio.server(interceptors=[CallInterceptor()])
    registered(Sessions(most), server)
    address = "127.0.0.1:0"
    port = (
        server.add_insecure_port(address)
        if files is None
        else server.add_secure_port(address, server_credentials(files))
    )
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def hold(channel: Any) -> Any:
    """Open a session; return its call, or the error of its refusal."""
    call = channel.stream_stream(f"/{SERVICE}/hold", bytes, bytes)(timeout=20)
    try:
        await call.write(b"?")
        assert await call.read() == b"open"
    except grpc.aio.AioRpcError as refused:
        return refused
    return call


def refusal(found: Any) -> str:
    assert isinstance(found, grpc.aio.AioRpcError), "it is open"
    assert found.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    return str(found.details())


@pytest.mark.parametrize("multiplexed", [False, True])
async def test_a_client_is_known_by_its_certificate_on_all_its_connections(tmp_path: Path, multiplexed: bool) -> None:
    authority = Authority(tmp_path / "ca")
    files = TlsFiles(*authority.issue("server"), authority.file)
    async with AsyncExitStack() as exits:
        address = await exits.enter_async_context(serving(2, files))

        def channel(name: str) -> Any:
            certificate, key = authority.issue("client", name)
            contents = TlsFiles(certificate, key, authority.file).read()
            found: Any = grpc.aio.secure_channel(address, channel_credentials(contents))
            found = MuxChannel(found) if multiplexed else found
            exits.push_async_callback(found.close)
            return found

        one, again, other = channel("one.svc"), channel("one.svc"), channel("other.svc")
        first, second = await hold(one), await hold(again)  # kept, since a garbage-collected call is cancelled
        assert not any(isinstance(call, grpc.aio.AioRpcError) for call in (first, second))
        assert refusal(await hold(one)) == "2 sessions are open for one client, the limit is reached"
        assert not isinstance(await hold(other), grpc.aio.AioRpcError)
        first.cancel()
        found: Any = grpc.aio.AioRpcError
        for _ in range(100):  # until the server has noticed the cancellation
            if not isinstance(found := await hold(again), grpc.aio.AioRpcError):
                break
        assert not isinstance(found, grpc.aio.AioRpcError)


async def test_without_certificates_it_is_known_by_its_host() -> None:
    async with (
        serving(1) as address,
        grpc.aio.insecure_channel(address) as one,
        grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as other,
    ):
        first = await hold(one)
        assert not isinstance(first, grpc.aio.AioRpcError)
        assert refusal(await hold(other)) == "1 sessions are open for one client, the limit is reached"


class Caller:
    """The context of a call without a certificate."""

    def __init__(self, peer: str) -> None:
        self._peer = peer

    def peer(self) -> str:
        return self._peer

    def auth_context(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize(
    ("peer", "other", "same"),
    [
        ("ipv6:%5B2001:db8::1%5D:1", "ipv6:[2001:db8::ffff:1]:2", True),  # a host owns a /64
        ("ipv6:[2001:db8:0:1::1]:1", "ipv6:[2001:db8:0:2::1]:1", False),
        ("ipv4:10.0.0.1:1", "ipv6:[::ffff:10.0.0.1]:2", True),
        ("ipv4:10.0.0.1:1", "ipv4:10.0.0.2:1", False),
        ("unix:a", "unix:b", False),
    ],
)
def test_a_host_is_known_by_its_network(peer: str, other: str, same: bool) -> None:
    found: list[Any] = [Caller(peer), Caller(other)]
    assert (client_of(found[0]) == client_of(found[1])) is same


async def test_by_default_there_is_no_limit() -> None:
    async with serving(None) as address, grpc.aio.insecure_channel(address) as one:
        for _ in range(20):
            assert not isinstance(await hold(one), grpc.aio.AioRpcError)
