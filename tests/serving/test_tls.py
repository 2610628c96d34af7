"""TLS files are reloaded when they change and are consistent; errors name the file."""

from __future__ import annotations

import shutil
from pathlib import Path

import grpc
import pytest

from specdec.serving.tls import server_credentials
from specdec.serving.watched import Watched
from specdec.wire.tls_files import TlsError, TlsFiles
from tests.captured_logs import captured_logs
from tests.certificates import Authority


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca")


@pytest.fixture
def files(authority: Authority) -> TlsFiles:
    return TlsFiles(*authority.issue("server"), authority.file)


def test_files_are_read_again_when_they_change(authority: Authority, files: TlsFiles) -> None:
    watched = Watched(files)
    before = watched.contents
    assert not watched.changed()
    authority.issue("server")
    assert watched.changed()
    assert before != watched.contents == files.read()
    assert not watched.changed()


def test_a_pair_that_does_not_fit_is_left_alone_until_it_does(authority: Authority, files: TlsFiles) -> None:
    watched = Watched(files)
    before = watched.contents
    certificate, key = authority.issue("other")
    assert files.certificate is not None
    assert files.key is not None
    shutil.copy(certificate, files.certificate)
    with captured_logs() as logs:
        assert not watched.changed()
        assert not watched.changed()
    assert [each["event"] for each in logs] == ["files_refused"]  # logged once
    assert watched.contents == before
    shutil.copy(key, files.key)
    with captured_logs() as logs:
        assert watched.changed()
        assert watched.contents.key == key.read_bytes()
        authority.issue("server")
        assert watched.changed()
    levels = [(line["event"], line["log_level"]) for line in logs]
    assert levels == [("files_changed", "warning"), ("files_changed", "info")]  # as loud as the refusal before it


def test_a_file_that_is_gone_for_a_moment_changes_nothing(authority: Authority, tmp_path: Path) -> None:
    certificate, key = authority.issue("server")
    (link := tmp_path / "link.pem").symlink_to(key)
    watched = Watched(TlsFiles(certificate, link, None))
    link.unlink()
    with captured_logs() as logs:
        assert not watched.changed()
        link.symlink_to(key)
        assert not watched.changed()
        assert not watched.changed()
    levels = [(line["event"], line["log_level"]) for line in logs]
    assert levels == [("files_refused", "warning"), ("files_changed", "warning")]


def test_a_folder_that_is_swapped_by_a_link_is_seen(authority: Authority, tmp_path: Path) -> None:
    """As Kubernetes updates a mounted secret."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        for file, kind in zip(authority.issue("server"), ("tls.crt", "tls.key"), strict=True):
            shutil.copy(file, tmp_path / name / kind)
    data = tmp_path / "data"
    data.symlink_to("one")
    watched = Watched(TlsFiles(data / "tls.crt", data / "tls.key", authority.file))
    (tmp_path / "next").symlink_to("two")
    (tmp_path / "next").rename(data)
    assert watched.changed()
    assert watched.contents.key == (tmp_path / "two" / "tls.key").read_bytes()


def test_wrong_files_are_named(authority: Authority, tmp_path: Path) -> None:
    certificate, key = authority.issue("server")
    other, _ = authority.issue("other")
    text = tmp_path / "text.pem"
    text.write_text("no certificate\n")
    none = tmp_path / "none.pem"

    def refusal(certificate: Path | None, key: Path | None, authorities: Path | None) -> str:
        with pytest.raises(TlsError) as raised:
            server_credentials(TlsFiles(certificate, key, authorities))
        assert "\n" not in str(raised.value)
        return str(raised.value)

    assert refusal(certificate, None, None) == "--tls-cert is given, --tls-key is missing"
    assert refusal(None, key, None) == "--tls-key is given, --tls-cert is missing"
    assert refusal(None, None, authority.file) == "--tls-client-ca is given, --tls-cert and --tls-key are missing"
    assert refusal(none, key, None) == f"--tls-cert {none}: No such file or directory"
    assert refusal(certificate, tmp_path, None) == f"--tls-key {tmp_path}: Is a directory"
    assert f"--tls-cert {other}, --tls-key {key}: must be a certificate and its unencrypted key" in refusal(
        other, key, None
    )
    assert f"--tls-cert {certificate}, --tls-key {text}: must" in refusal(certificate, text, None)
    assert refusal(certificate, key, text).startswith(f"--tls-client-ca {text}: contains no PEM certificate")


def test_an_encrypted_key_is_refused_without_asking_anybody(authority: Authority, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization

    certificate, key = authority.issue("server")
    loaded = serialization.load_pem_private_key(key.read_bytes(), None)
    encrypted = tmp_path / "encrypted.pem"
    encrypted.write_bytes(
        loaded.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    with pytest.raises(TlsError, match=r"unencrypted key, in PEM \(the key is encrypted"):
        TlsFiles(certificate, encrypted, None).read()


async def test_a_server_shows_its_new_certificate(authority: Authority, files: TlsFiles) -> None:
    """New connections see it. A client with a certificate of another authority gets no response."""
    server = grpc.aio.server()
    port = server.add_secure_port("127.0.0.1:0", server_credentials(files))
    await server.start()

    async def reached(ca: Authority) -> bool:
        contents = ca.contents("client")
        trusted = authority.file.read_bytes()
        credentials = grpc.ssl_channel_credentials(trusted, contents.key, contents.certificate)
        async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials) as channel:
            ask: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/specdec.v2.Nothing/Nothing")
            return await ask(b"", timeout=20).code() is grpc.StatusCode.UNIMPLEMENTED  # answered by the server

    try:
        assert await reached(authority)
        assert not await reached(Authority(authority.file.parent / "foreign"))
        authority.issue("server", "another.example")
        assert not await reached(authority)  # the new certificate is for another host
        authority.issue("server")
        assert await reached(authority)
    finally:
        await server.stop(None)
