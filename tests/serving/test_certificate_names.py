"""Only clients whose certificates are for certain names are served, by calls of their own and by streams of a
multiplexed connection; the method of a stream sees who its caller is."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from specdec.client.tls_files import TlsFiles, channel_credentials
from specdec.serving.certificate_names import CertificateNames
from specdec.serving.interceptor import CallInterceptor
from specdec.serving.mux.channel import MuxChannel
from specdec.serving.process.server import registered
from specdec.serving.tls import server_credentials
from tests.certificates import Authority

SERVICE = "tests.Names"
ORCHESTRATOR = "orchestrator.specdec.svc"


class Names:
    """A service whose one method answers with the names of its caller's certificate."""

    name = SERVICE

    def register(self, server: Any) -> None:
        methods = {"ask": grpc.stream_stream_rpc_method_handler(self.ask, bytes, bytes)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
        server.add_registered_method_handlers(SERVICE, methods)

    async def close(self) -> None:
        pass

    async def ask(self, requests: AsyncIterator[bytes], context: Any) -> None:
        async for _ in requests:
            await context.write(b" ".join(context.peer_identities()))


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca")


@asynccontextmanager
async def serving(authority: Authority, *names: str) -> AsyncIterator[str]:
    """The address of a server that serves clients with these names."""
    server = grpc.aio.server(interceptors=[CallInterceptor(caller_gates=[CertificateNames(names)])])
    registered(Names(), server)
    files = TlsFiles(*authority.issue("server"), authority.file)
    port = server.add_secure_port("127.0.0.1:0", server_credentials(files))
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def asked(authority: Authority, address: str, name: str, *, multiplexed: bool) -> bytes:
    """Return the answer to a client with a certificate for this name."""
    certificate, key = authority.issue("client", name)
    contents = TlsFiles(certificate, key, authority.file).read()
    channel: Any = grpc.aio.secure_channel(address, channel_credentials(contents))
    if multiplexed:
        channel = MuxChannel(channel)
    try:
        call = channel.stream_stream(f"/{SERVICE}/ask", bytes, bytes)(timeout=20)
        await call.write(b"?")
        answer = await call.read()
        assert isinstance(answer, bytes), await call.code()
        await call.done_writing() if not multiplexed else call.cancel()
        return answer
    finally:
        await channel.close()


@pytest.mark.parametrize("multiplexed", [False, True])
async def test_a_name_among_them_is_served(authority: Authority, multiplexed: bool) -> None:
    async with serving(authority, "another.specdec.svc", ORCHESTRATOR) as address:
        assert await asked(authority, address, ORCHESTRATOR, multiplexed=multiplexed) == ORCHESTRATOR.encode()


@pytest.mark.parametrize("multiplexed", [False, True])
async def test_any_other_name_is_refused(authority: Authority, multiplexed: bool) -> None:
    """Though the authority vouches for it; a name that merely begins alike is another one. A stream ends as with any
    connection that cannot be had: another pod may serve it."""
    code = grpc.StatusCode.UNAVAILABLE if multiplexed else grpc.StatusCode.PERMISSION_DENIED
    async with serving(authority, ORCHESTRATOR) as address:
        for name in ("draft.specdec.svc", f"{ORCHESTRATOR}.evil.example", "127.0.0.1"):
            with pytest.raises((grpc.aio.AioRpcError, grpc.aio.UsageError)) as refused:
                await asked(authority, address, name, multiplexed=multiplexed)
            assert isinstance(refused.value, grpc.aio.AioRpcError)
            assert refused.value.code() is code
            assert name in str(refused.value.details())
