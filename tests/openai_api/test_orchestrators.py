"""Connections to orchestrators: one serving address behind a name suffices, and connections are renewed regularly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health

from specdec.client import AsyncClient, Unavailable
from specdec.openai_api import orchestrators as module
from specdec.openai_api.errors import ApiError
from specdec.openai_api.gateway import Caller, Gateway
from specdec.openai_api.orchestrators import Orchestrators
from specdec.serving.tls import server_credentials
from specdec.v2.generation_pb2_grpc import add_GenerationServiceServicer_to_server
from specdec.wire.tls_files import TlsFiles
from tests.certificates import Authority
from tests.client.fake_server import CHUNK, TEXT, Act, FakeServer
from tests.faults.pods import free_port

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

pytestmark = pytest.mark.timeout(60)


@asynccontextmanager
async def watching(orchestrators: Orchestrators) -> AsyncIterator[Orchestrators]:
    """Renew these orchestrators' connections until the context ends."""
    orchestrators.start()
    try:
        yield orchestrators
    finally:
        await orchestrators.close()


@asynccontextmanager
async def health_of(status: int, port: int = 0) -> AsyncIterator[str]:
    """Serve health checks with this status; yield the address."""
    server, servicer = grpc.aio.server(), health.HealthServicer()
    await servicer.set("", status)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def until_it_serves(orchestrators: Orchestrators) -> None:
    async with asyncio.timeout(30):
        while not await orchestrators.serve():
            await asyncio.sleep(0.01)


async def client_of(orchestrators: Orchestrators) -> AsyncClient:
    async with orchestrators.client() as client:
        return client


async def until_anew(orchestrators: Orchestrators, old: AsyncClient) -> None:
    async with asyncio.timeout(30):
        while await client_of(orchestrators) is old:
            await asyncio.sleep(0.01)


async def test_one_of_those_that_an_address_stands_for_suffices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KNOWN_SECONDS", 0.0)
    async with health_of(NOT_SERVING) as one, health_of(SERVING) as other, health_of(NOT_SERVING) as third:
        orchestrators = Orchestrators([f"ipv4:{one},{other},{third}"])
        await until_it_serves(orchestrators)  # connections are tried one after the other
        await orchestrators.close()
        orchestrators = Orchestrators([f"ipv4:{one},{third}", one])
        assert not await orchestrators.serve()
        await orchestrators.close()


async def test_connections_are_made_anew_while_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(module, "SILENT_SECONDS", 0.1)
    monkeypatch.setattr(module, "KNOWN_SECONDS", 0.0)
    port = free_port()
    several = f"ipv4:127.0.0.1:{port},127.0.0.1:{free_port()}"  # as if a DNS name had two addresses
    async with watching(Orchestrators([several])) as orchestrators:
        first = await client_of(orchestrators)
        await until_anew(orchestrators, first)
        async with health_of(NOT_SERVING, port):  # NOT_SERVING is an answer too
            monkeypatch.setattr(module, "SILENT_SECONDS", 30.0)
            async with asyncio.timeout(30):
                while not await orchestrators._current.answers():
                    await asyncio.sleep(0.01)


@pytest.mark.verify
async def test_new_files_of_certificates_count_for_new_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Running requests finish on the old connection."""
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.02)
    authority, other = Authority(tmp_path / "authority"), Authority(tmp_path / "other")
    fake, server = FakeServer(Act(tokens=CHUNK, then="hold")), grpc.aio.server()
    add_GenerationServiceServicer_to_server(fake, server)
    port = server.add_secure_port("127.0.0.1:0", server_credentials(authority.files("server")))
    await server.start()
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(authority.file.read_bytes())
    certificate, key = authority.issue("front")
    files = TlsFiles(certificate, key, trusted)
    async with watching(Orchestrators([f"127.0.0.1:{port}"], files)) as orchestrators:
        async with orchestrators.client() as client, client.generate("hi") as running:
            await anext(running)
            await asyncio.wait_for(fake.held.wait(), 30)
            trusted.write_bytes(other.file.read_bytes())
            await until_anew(orchestrators, client)
            async with orchestrators.client() as second:
                with pytest.raises(Unavailable):
                    await second.complete("hi", timeout=30.0)
            assert not fake.freed.is_set()
            await client.models()  # old connections are not closed
            trusted.write_bytes(authority.file.read_bytes())
            await until_anew(orchestrators, second)
            async with orchestrators.client() as third:
                assert (await third.complete("hi")).text == TEXT
        await asyncio.wait_for(fake.freed.wait(), 30)
    await server.stop(0)


async def test_connections_that_were_left_are_closed_with_their_last_request() -> None:
    async with FakeServer(Act(tokens=CHUNK, then="hold")) as server:
        connections = Orchestrators([server.address])._current
        async with connections.client() as client, client.generate("hi") as running:
            await anext(running)
            await connections.leave()
            assert client._channels
        assert not client._channels


async def test_control_calls_do_not_wait_for_completions() -> None:
    """Completions occupy all of their ten connections, each of which allows one concurrent call."""
    most = 10
    hold = [Act(tokens=CHUNK, then="hold")] * most
    async with FakeServer(*hold, options=[("grpc.max_concurrent_streams", 1)]) as server:
        orchestrators = Orchestrators([server.address])
        async with AsyncExitStack() as running:
            running.push_async_callback(orchestrators.close)
            client = await running.enter_async_context(orchestrators.client())
            for _ in range(most):
                await anext(await running.enter_async_context(client.generate("hi")))
            gateway = Gateway(orchestrators.client, orchestrators.control_client, orchestrators.key_client)
            async with asyncio.timeout(30):
                assert await gateway.models(Caller("1"))


async def test_each_check_of_a_key_has_a_connection_of_its_own() -> None:
    """An orchestrator mutes connections that carry only refused calls; control calls must still be answered."""
    async with FakeServer(keys=["key"]) as server:
        orchestrators = Orchestrators([server.address])
        gateway = Gateway(orchestrators.client, orchestrators.control_client, orchestrators.key_client)
        for _ in range(3):
            with pytest.raises(ApiError):
                await gateway.check_key("Bearer wrong")
        await gateway.check_key("Bearer key")
        assert len(set(server.refused_peers)) == server.refusals == 3
        await orchestrators.close()
