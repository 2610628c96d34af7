"""A pod's certificate must be valid for the host by which the pod was found, or for the configured name."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from specdec.serving import watched
from specdec.serving.pods.connections import CHECK_SECONDS, SecureConnections, connect
from specdec.serving.tls import server_credentials
from specdec.wire.tls_files import Contents, TlsError, TlsFiles
from tests.captured_logs import captured_logs
from tests.certificates import Authority


@pytest.mark.parametrize(
    ("name", "found_by", "reached"),
    [
        (None, "verifier.example", True),  # by DNS
        (None, "other.example", False),
        (None, None, False),  # by its IP address, which the certificate lacks
        ("verifier.example", None, True),
        ("verifier.example", "other.example", True),
        ("other.example", "verifier.example", False),
    ],
)
async def test_a_certificate_must_be_for_the_name(
    tmp_path: Path, name: str | None, found_by: str | None, reached: bool
) -> None:
    authority = Authority(tmp_path / "ca")
    server = grpc.aio.server()
    credentials = server_credentials(TlsFiles(*authority.issue("server", "verifier.example"), None))
    address = f"127.0.0.1:{server.add_secure_port('127.0.0.1:0', credentials)}"
    await server.start()
    names = {} if found_by is None else {address: found_by}
    channel = SecureConnections(TlsFiles(None, None, authority.file), name, names)(address)
    try:
        ask: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/specdec.v2.Nothing/Nothing")
        code = await ask(b"", timeout=20).code()
        assert code is (grpc.StatusCode.UNIMPLEMENTED if reached else grpc.StatusCode.UNAVAILABLE)
    finally:
        await channel.close()
        await server.stop(None)


@pytest.mark.usefixtures("unused_proxy")
async def test_pods_are_reached_without_the_proxy_of_the_web() -> None:
    server = grpc.aio.server()
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    channel = connect(address)
    try:
        ask: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/specdec.v2.Nothing/Nothing")
        assert await ask(b"", timeout=20).code() is grpc.StatusCode.UNIMPLEMENTED
    finally:
        await channel.close()
        await server.stop(None)


def test_files_that_cannot_be_used_are_told_at_start(tmp_path: Path) -> None:
    none = tmp_path / "none.pem"
    files = TlsFiles(None, None, none, ("--peer-tls-cert", "--peer-tls-key", "--peer-tls-ca"))
    with pytest.raises(TlsError, match=r"--peer-tls-ca .*none\.pem: No such file or directory"):
        SecureConnections(files, None, {})


class CountedFiles(TlsFiles):
    """TLS files that count how often they are looked at and read."""

    looks = reads = 0

    def version(self) -> Any:
        type(self).looks += 1
        return super().version()

    def read(self) -> Contents:
        type(self).reads += 1
        return super().read()


async def test_all_pods_share_one_look_at_the_files_a_second(tmp_path: Path) -> None:
    class Files(CountedFiles):
        pass

    now = 0.0
    authority = Authority(tmp_path / "ca")
    files = Files(*authority.issue("orchestrator"), authority.file)
    connections = SecureConnections(files, None, {}, lambda: now)
    channels: Sequence[Any] = [connections(f"127.0.0.1:{port}") for port in (1, 2, 3)]

    def renewed() -> list[bool]:
        before = [channel._current for channel in channels]
        for channel in channels:
            for _ in range(5):
                channel.unary_unary("/specdec.v2.Nothing/Nothing")
        return [channel._current is not carrier for channel, carrier in zip(channels, before, strict=True)]

    looks, refused = Files.looks, watched.refused()["TLS files"]
    authority.issue("orchestrator")
    assert renewed() == [False] * 3
    assert Files.looks == looks
    now += CHECK_SECONDS
    assert renewed() == [True] * 3
    assert (Files.looks, Files.reads) == (looks + 2, 2)  # looked at before and after it is read
    assert renewed() == [False] * 3
    authority.file.write_text("no certificate")
    now += CHECK_SECONDS
    with captured_logs() as logs:
        assert renewed() == [False] * 3
    assert [line["event"] for line in logs] == ["files_refused"]
    assert watched.refused()["TLS files"] == refused + 1
    await asyncio.gather(*(channel.close() for channel in channels))
