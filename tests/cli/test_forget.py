"""`specdec forget` calls every server of an address, and fails if one of them does."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from specdec.cli.access import OPEN, access
from specdec.cli.forget import forget_at
from specdec.exit_status import ExitStatus
from specdec.serving.tls import server_credentials
from specdec.v2 import learning_pb2, learning_pb2_grpc
from specdec.wire.address import Address
from specdec.wire.tls_files import TlsFiles
from tests.certificates import Authority

NAME = "drafts.example"
NOTHING = learning_pb2.ForgetResponse()


class Draft(learning_pb2_grpc.LearningServiceServicer):
    """Keeps a text of every tenant but "nobody", unless it is broken."""

    def __init__(self, broken: bool) -> None:
        self._broken = broken

    def Forget(self, request: learning_pb2.ForgetRequest, context: grpc.ServicerContext) -> learning_pb2.ForgetResponse:
        if self._broken:
            context.abort(grpc.StatusCode.PERMISSION_DENIED, "no")
        return learning_pb2.ForgetResponse(texts=1, tokens=8) if request.tenant != "nobody" else NOTHING

    def GetTraffic(
        self, request: learning_pb2.GetTrafficRequest, context: grpc.ServicerContext
    ) -> Iterator[learning_pb2.GetTrafficResponse]:
        yield from ()


@contextmanager
def drafts(count: int, broken: Sequence[int] = (), tls: TlsFiles | None = None) -> Iterator[int]:
    """Serve drafts at 127.0.0.1, 127.0.0.2, ...; yield their port."""
    port = 0
    with ExitStack() as servers:
        for number in range(count):
            server = grpc.server(ThreadPoolExecutor(1))
            learning_pb2_grpc.add_LearningServiceServicer_to_server(Draft(number in broken), server)
            at = f"127.0.0.{number + 1}:{port}"
            port = server.add_insecure_port(at) if tls is None else server.add_secure_port(at, server_credentials(tls))
            server.start()
            servers.callback(server.stop, None)
        yield port


def records(*hosts: str) -> Any:
    """Return a resolver that knows one name."""

    def resolve(host: str, port: int, *, type: int) -> list[tuple[Any, ...]]:
        if host != NAME:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        families = {host: socket.AF_INET6 if ":" in host else socket.AF_INET for host in hosts}
        return [(families[host], type, 0, "", (host, port)) for host in hosts]

    return resolve


resolved = partial(records, "127.0.0.1", "127.0.0.2")


@pytest.mark.parametrize("form", ["{}:{}", "dns:{}:{}", "dns:///{}:{}"])
def test_every_server_behind_a_name_forgets(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    with drafts(2) as port:
        forget_at([Address.parse(form.format(NAME, port))], "acme", 20, OPEN, resolved("::1"))
    assert capsys.readouterr().out.splitlines() == [
        f"127.0.0.{number}:{port}: 1 texts, 8 tokens forgotten" for number in (1, 2)
    ]


def test_every_given_server_forgets(capsys: pytest.CaptureFixture[str]) -> None:
    with drafts(2) as port:
        forget_at([Address.parse(f"ipv4:127.0.0.1:{port},127.0.0.2:{port}")], "acme", 20, OPEN)
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_a_server_that_fails_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with drafts(2, broken=[0]) as port, pytest.raises(SystemExit) as end:
        forget_at([Address.parse(f"{NAME}:{port}")], "acme", 20, OPEN, resolved())
    said = capsys.readouterr()
    assert said.out == f"127.0.0.2:{port}: 1 texts, 8 tokens forgotten\n"
    assert said.err.startswith(f"specdec: 127.0.0.1:{port}: ")
    assert said.err.endswith(": it may still keep the texts\n")
    assert end.value.code == ExitStatus.REFUSED


def test_a_tenant_of_whom_nothing_is_known_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with drafts(1) as port:
        forget_at([Address.parse(f"127.0.0.1:{port}")], "nobody", 20, OPEN)
    said = capsys.readouterr()
    assert said.out == f"127.0.0.1:{port}: 0 texts, 0 tokens forgotten\n"
    assert "nothing of tenant 'nobody' was known here" in said.err


def test_another_kind_of_server_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with ExitStack() as servers:
        server = grpc.server(ThreadPoolExecutor(1))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        servers.callback(server.stop, None)
        with pytest.raises(SystemExit) as end:
            forget_at([Address.parse(f"127.0.0.1:{port}")], "acme", 20, OPEN)
    assert "is not a draft service that keeps texts" in capsys.readouterr().err
    assert end.value.code != 0


def test_a_name_without_records_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with drafts(2) as port:
        addresses = [Address.parse(f"{name}:{port}") for name in ("nowhere.example", NAME)]
        with pytest.raises(SystemExit) as end:
            forget_at(addresses, "acme", 20, OPEN, resolved())
    said = capsys.readouterr()
    assert len(said.out.splitlines()) == 2
    assert said.err == (
        f"specdec: nowhere.example:{port}: cannot be resolved (Name or service not known): "
        "it may still keep the texts\n"
    )
    assert end.value.code == ExitStatus.UNREACHABLE


def test_certificates_must_be_for_the_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    authority = Authority(tmp_path / "authority")
    certificate, key = authority.issue("draft", NAME)
    allowed = access(tls_ca=authority.file)
    with drafts(2, tls=TlsFiles(certificate, key, None)) as port:
        forget_at([Address.parse(f"{NAME}:{port}")], "acme", 20, allowed, resolved())
        assert len(capsys.readouterr().out.splitlines()) == 2
        with pytest.raises(SystemExit):
            forget_at([Address.parse(f"127.0.0.1:{port}")], "acme", 5, allowed, resolved())
