"""Only clients with an allowed certificate name are served, by unary calls and by streams of a multiplexed connection.
A stream's method sees its caller's identity. Names are compared as wholes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509

from specdec.serving.callers.certificate import Name, names_of, parse_name
from specdec.serving.interceptor import CallInterceptor
from specdec.serving.mux.channel import MuxChannel
from specdec.serving.process.server import registered
from specdec.serving.tls import CertificateNames, server_credentials
from specdec.wire.tls_files import TlsFiles, channel_credentials
from tests.certificates import Authority

SERVICE = "tests.Names"
ORCHESTRATOR = "orchestrator.specdec.svc"


class Names:
    """A service whose one method answers with the names in its caller's certificate."""

    name = SERVICE

    def register(self, server: Any) -> None:
        methods = {"ask": grpc.stream_stream_rpc_method_handler(self.ask, bytes, bytes)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
        server.add_registered_method_handlers(SERVICE, methods)

    async def close(self) -> None:
        pass

    async def ask(self, requests: AsyncIterator[bytes], context: Any) -> None:
        async for _ in requests:
            await context.write(" ".join(map(str, names_of(context.auth_context()))).encode())


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca")


@asynccontextmanager
async def serving(authority: Authority, *names: str) -> AsyncIterator[str]:
    """Yield the address of a server that serves clients with these names."""
    server = grpc.aio.server(interceptors=[CallInterceptor(caller_gates=[CertificateNames(map(parse_name, names))])])
    registered(Names(), server)
    files = TlsFiles(*authority.issue("server"), authority.file)
    port = server.add_secure_port("127.0.0.1:0", server_credentials(files))
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def asked(authority: Authority, address: str, name: str, *, multiplexed: bool) -> bytes:
    """Return the answer to a client with a certificate for `name`."""
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
    """Even with a certificate from the same authority, or with a name that has the same prefix. A multiplexed stream
    ends as on any failed connection, since another pod may serve it."""
    code = grpc.StatusCode.UNAVAILABLE if multiplexed else grpc.StatusCode.PERMISSION_DENIED
    async with serving(authority, ORCHESTRATOR) as address:
        for name in ("draft.specdec.svc", f"{ORCHESTRATOR}.evil.example", "127.0.0.1"):
            with pytest.raises((grpc.aio.AioRpcError, grpc.aio.UsageError)) as refused:
                await asked(authority, address, name, multiplexed=multiplexed)
            assert isinstance(refused.value, grpc.aio.AioRpcError)
            assert refused.value.code() is code
            assert name in str(refused.value.details())


HOST, EVIL = "orchestrator.svc", "evil.example"


@pytest.mark.parametrize(
    ("accepted", "common_name", "names", "passes"),
    [
        (HOST, EVIL, [x509.DNSName(HOST)], True),
        (HOST, EVIL, [x509.DNSName(EVIL), x509.DNSName(HOST)], True),
        (HOST, EVIL, [x509.DNSName("ORCHESTRATOR.svc.")], True),  # case and the trailing dot of the root are ignored
        ("Orchestrator.SVC", EVIL, [x509.DNSName(HOST)], True),
        (HOST, EVIL, [x509.DNSName(f"{HOST}\0.{EVIL}")], False),
        (HOST, EVIL, [x509.DNSName(f"{HOST}.{EVIL}")], False),
        (HOST, EVIL, [x509.DNSName("*.svc")], False),  # a wildcard does not name a caller
        (HOST, EVIL, [x509.UniformResourceIdentifier(HOST)], False),
        (HOST, EVIL, [x509.UniformResourceIdentifier(f"spiffe://{HOST}")], False),
        (HOST, EVIL, [x509.RFC822Name(HOST)], False),
        (HOST, EVIL, [x509.RFC822Name(f"x@{HOST}")], False),
        (HOST, HOST, [], False),  # the common name is ignored
        (HOST, HOST, [x509.DNSName(EVIL)], False),
        ("10.0.0.7", EVIL, [x509.IPAddress(ip_address("10.0.0.7"))], True),
        ("10.0.0.7", EVIL, [x509.DNSName("10.0.0.7")], False),  # an address is not a host name
        ("2001:DB8:0::1", EVIL, [x509.IPAddress(ip_address("2001:db8::1"))], True),
        ("spiffe://svc/orchestrator", EVIL, [x509.UniformResourceIdentifier("spiffe://svc/orchestrator")], True),
        ("spiffe://svc/orchestrator", EVIL, [x509.UniformResourceIdentifier("spiffe://svc/Orchestrator")], False),
        ("spiffe://svc/orchestrator", EVIL, [x509.UniformResourceIdentifier("spiffe://svc/orchestrator\0x")], False),
    ],
)
async def test_a_name_counts_as_what_it_is(
    authority: Authority, accepted: str, common_name: str, names: list[x509.GeneralName], passes: bool
) -> None:
    contents = authority.issue_with(common_name, *names)
    async with (
        serving(authority, accepted) as address,
        grpc.aio.secure_channel(address, channel_credentials(contents)) as channel,
    ):
        call: Any = channel.stream_stream(f"/{SERVICE}/ask", bytes, bytes)(timeout=20)
        await call.done_writing()
        assert await call.code() is (grpc.StatusCode.OK if passes else grpc.StatusCode.PERMISSION_DENIED)


def test_without_a_certificate_there_are_no_names() -> None:
    assert names_of({}) == names_of({"x509_pem_cert": [b"no certificate"]}) == frozenset()


@pytest.mark.parametrize("text", ["", "*.svc", "a b", "x@orchestrator.svc", f"{HOST}\0", "-a", "a..b", "[::1]", "://x"])
def test_what_is_no_name_is_refused_at_start(text: str) -> None:
    with pytest.raises(ValueError, match="not a host name, IP address or URI"):
        parse_name(text)


def test_names_are_spelled_in_one_way() -> None:
    assert parse_name("A.Example.") == Name("host", "a.example")
    assert parse_name("::FFFF") == Name("address", "::ffff")
