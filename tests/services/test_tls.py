"""The three services with mutual TLS, as processes: callers without a certificate are refused, certificates are renewed
under load, and tokens equal those without TLS."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec import AsyncClient, Client
from specdec.client.errors import Unavailable
from specdec.roles import environment
from specdec.wire.tls_files import channel_credentials
from tests.certificates import Authority
from tests.faults.cluster import Cluster, Models
from tests.faults.pods import free_port
from tests.services.conftest import Directories

pytestmark = pytest.mark.timeout(900)  # several processes start, slowly on a busy machine

PROMPT = "def main("
SERVICES = ("verifier", "draft", "orchestrator")
FEW = ("--kv-tokens", "4096")


class Secured:
    """Services that present certificates and require them."""

    def __init__(self, authority: Authority, addresses: dict[str, str], health_ports: dict[str, int]) -> None:
        self.authority = authority
        self.addresses = addresses
        self.address = addresses["orchestrator"]
        self.health_ports = health_ports

    def credentials(self, authority: Authority) -> grpc.ChannelCredentials:
        """Return the credentials of a client with a certificate from this authority."""
        contents = authority.contents("client")
        return channel_credentials(contents._replace(authorities=self.authority.file.read_bytes()))


@pytest.fixture(scope="module")
def secured(directories: Directories, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    authority = Authority(tmp_path_factory.mktemp("certificates"))
    ports = {service: free_port() for service in SERVICES}

    def options(service: str) -> tuple[str, ...]:
        certificate, key = authority.issue(service)
        own = ("--tls-cert", str(certificate), "--tls-key", str(key), "--tls-client-ca", str(authority.file))
        return (*own, "--health-port", str(ports[service]))

    certificate, key = authority.issue("peer")
    peers = ("--peer-tls-ca", str(authority.file), "--peer-tls-cert", str(certificate), "--peer-tls-key", str(key))
    models = Models(directories.target, directories.near, directories.target)
    with Cluster(models, tmp_path_factory.mktemp("logs")) as cluster:
        verifier, draft = cluster.verifier(*options("verifier"), *FEW), cluster.draft(*options("draft"), *FEW)
        front = cluster.orchestrator([verifier.address], [draft.address], *options("orchestrator"), *peers)
        asyncio.run(cluster.make_whole())
        addresses = dict(zip(SERVICES, (verifier.address, draft.address, front.address), strict=True))
        yield Secured(authority, addresses, ports)


def test_tokens_are_those_of_the_plain_model(secured: Secured, directories: Directories) -> None:
    with Client(secured.address, credentials=secured.credentials(secured.authority)) as client:
        drafted = client.complete(PROMPT, max_tokens=40, seed=3, temperature=0.8, speculation="always")
        while "remote_draft" not in drafted.completions[0].sources:  # on a busy machine the draft may be late
            drafted = client.complete(PROMPT, max_tokens=40, seed=3, temperature=0.8, speculation="always")
        plain = client.complete(PROMPT, max_tokens=40, seed=3, temperature=0.8, speculation="off")
        greedy = client.complete(PROMPT, max_tokens=24)
        prompt = client.tokenize(PROMPT).ids
    assert drafted.completions[0].tokens == plain.completions[0].tokens
    tokens = greedy.completions[0].tokens
    assert tokens == directories.oracle.greedy(prompt, len(tokens))


@pytest.mark.parametrize("service", SERVICES)
def test_who_has_no_certificate_gets_nothing(secured: Secured, service: str, tmp_path: Path) -> None:
    trusted = secured.authority.file.read_bytes()
    channels = {
        "no TLS": grpc.insecure_channel(secured.addresses[service]),
        "no certificate": grpc.secure_channel(secured.addresses[service], grpc.ssl_channel_credentials(trusted)),
        "a foreign one": grpc.secure_channel(
            secured.addresses[service], secured.credentials(Authority(tmp_path / "foreign"))
        ),
    }
    for channel in channels.values():
        with channel, pytest.raises(grpc.RpcError) as raised:
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20)
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("service", SERVICES)
def test_probes_need_no_certificate_and_reach_nothing_else(secured: Secured, service: str) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{secured.health_ports[service]}") as channel:
        answers = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=20)
        # The orchestrator looks for a ready verifier once a second.
        assert health_pb2.HealthCheckResponse.SERVING in (answer.status for answer in answers)
        for path in ("/specdec.v2.GenerationService/Complete", "/specdec.v2.VerifierService/GetStats"):
            ask: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(path)
            with pytest.raises(grpc.RpcError) as raised:
                ask(b"", timeout=20)
            assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_certificates_are_renewed_under_load(secured: Secured) -> None:
    """All certificates are renewed twice while texts run on old and new connections: no text fails."""
    over = asyncio.Event()
    texts = 0

    async def ask(number: int) -> None:
        nonlocal texts
        while not over.is_set():  # one client, hence one connection, per request
            credentials = secured.credentials(secured.authority)
            async with AsyncClient(secured.address, credentials=credentials, max_retries=0) as client:
                result = await client.complete(PROMPT, max_tokens=24, seed=number)
                assert len(result.completions[0].tokens) == 24
                texts += 1

    running = [asyncio.create_task(ask(number)) for number in range(3)]
    for _ in range(2):
        for service in (*SERVICES, "peer"):
            secured.authority.issue(service)
        before = texts
        while texts < before + 6:
            await asyncio.sleep(0.01)
            for each in running:
                if each.done():
                    each.result()
    over.set()
    await asyncio.gather(*running)
    assert_renewed(secured)


def assert_renewed(secured: Secured) -> None:
    """Issue a certificate for another host: if clients refuse it, services present their newest certificate."""
    secured.authority.issue("orchestrator", "another.example")
    try:
        credentials = secured.credentials(secured.authority)
        with Client(secured.address, credentials=credentials, timeout=5) as client, pytest.raises(Unavailable):
            client.models()
    finally:
        secured.authority.issue("orchestrator")


def test_commands_take_certificates(secured: Secured) -> None:
    certificate, key = secured.authority.issue("person")
    files = {"CA": secured.authority.file, "CERT": certificate, "KEY": key}

    def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "specdec.cli", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment() | variables)

    options = [word for name, file in files.items() for word in (f"--tls-{name.lower()}", str(file))]
    asked = run("generate", PROMPT, "--address", secured.address, "--max-tokens", "4", *options)
    assert asked.returncode == 0, asked.stderr
    variables = {f"SPECDEC_TLS_{name}": str(file) for name, file in files.items()}
    for service in SERVICES:
        shown = run("stats", secured.addresses[service], **variables)
        assert service in shown.stdout, shown.stderr
    counted = run("tokenize", PROMPT, "--count", "--address", secured.address, **variables)
    assert counted.stdout.strip().isdecimal()

    without = run("stats", secured.address, "--tls-ca", str(secured.authority.file))
    assert without.returncode == 69
