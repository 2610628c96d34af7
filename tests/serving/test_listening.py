"""If a server cannot listen, the error names the option."""

from __future__ import annotations

import asyncio
import errno
import socket

import grpc
import pytest

from specdec.serving.process.listening import ListenError, bound, joined
from specdec.serving.process.server import listen


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as holder:
            holder.bind(("::1", 0))
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="the machine has no IPv6")


def test_a_free_port_can_be_had_and_is_given_back() -> None:
    with bound("127.0.0.1", 0) as holder:
        port = holder.getsockname()[1]
    bound("127.0.0.1", port).close()


def test_a_shared_port_may_have_several_who_share_it() -> None:
    with bound("127.0.0.1", 0, shared=True) as first:
        port = first.getsockname()[1]
        bound("127.0.0.1", port, shared=True).close()
        first.listen()
        with pytest.raises(ListenError, match=f"^--port {port}: another program listens on 127.0.0.1:{port}: "):
            bound("127.0.0.1", port)


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid", "a" * 70])
@pytest.mark.parametrize(("option", "named"), [("--port", "--host"), ("--draft-port", "--draft-host")])
def test_a_host_that_is_not_ours(host: str, option: str, named: str) -> None:
    with pytest.raises(ListenError, match=f"^{named} {host}: cannot listen there .*0.0.0.0 for all interfaces$"):
        bound(host, 0, option=option)


@needs_ipv6
@pytest.mark.parametrize("host", ["::1", "::"])
async def test_a_server_listens_on_ipv6(host: str) -> None:
    bound(host, 0).close()
    server = grpc.aio.server()
    port = listen(server, host, 0, None)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"[::1]:{port}") as channel:
            await asyncio.wait_for(channel.channel_ready(), 20)
    finally:
        await server.stop(None)


@needs_ipv6
def test_a_taken_port_of_ipv6() -> None:
    with bound("::1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ListenError, match=rf"another program listens on \[::1\]:{port}: "):
            bound("::1", port)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", ""])
def test_ipv4_is_taken_where_there_is_a_choice(host: str) -> None:
    with bound(host, 0) as holder:
        assert holder.family is socket.AF_INET


@pytest.mark.parametrize(("host", "address"), [("a", "a:1"), ("::1", "[::1]:1"), ("10.0.0.1", "10.0.0.1:1")])
def test_host_and_port_are_joined_as_grpc_reads_them(host: str, address: str) -> None:
    assert joined(host, 1) == address


def test_a_port_that_only_root_may_have() -> None:
    error = PermissionError(errno.EACCES, "Permission denied")
    assert str(ListenError.of("127.0.0.1", 80, error)) == (
        "--port 80: this user may not listen on 127.0.0.1:80: give a port of at least 1024"
    )


def test_what_was_looked_at_is_closed() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ListenError):  # an unclosed socket would warn, and fail the test
            bound("127.0.0.1", taken.getsockname()[1])
