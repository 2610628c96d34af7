"""A pod's certificate must be valid for the host by which the pod was found, or for the configured name."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from specdec.serving.pods.connections import SecureConnections
from specdec.serving.tls import server_credentials
from specdec.wire.tls_files import TlsError, TlsFiles
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


def test_files_that_cannot_be_used_are_told_at_start(tmp_path: Path) -> None:
    none = tmp_path / "none.pem"
    files = TlsFiles(None, None, none, ("--peer-tls-cert", "--peer-tls-key", "--peer-tls-ca"))
    with pytest.raises(TlsError, match=r"--peer-tls-ca .*none\.pem: No such file or directory"):
        SecureConnections(files, None, {})
