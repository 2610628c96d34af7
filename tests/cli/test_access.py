"""Commands reach a server whose certificate is for a name other than its address."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest
import typer

from specdec.cli.access import access
from specdec.client import AsyncClient, Unavailable
from specdec.serving.tls import server_credentials
from specdec.v2 import generation_pb2, generation_pb2_grpc
from specdec.wire.tls_files import TlsFiles
from tests.certificates import Authority

NAME = "specdec-orchestrator.serving.svc.cluster.local"


class Models(generation_pb2_grpc.GenerationServiceServicer):
    """Reports an empty list of models."""

    async def ListModels(
        self, request: generation_pb2.ListModelsRequest, context: object
    ) -> generation_pb2.ListModelsResponse:
        return generation_pb2.ListModelsResponse()


@pytest.mark.parametrize("name", [NAME, None])
async def test_the_name_that_is_given_is_looked_for(tmp_path: Path, name: str | None) -> None:
    authority = Authority(tmp_path / "authority")
    certificate, key = authority.issue("orchestrator", NAME)
    server = grpc.aio.server()
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(Models(), server)  # type: ignore[abstract]
    port = server.add_secure_port("127.0.0.1:0", server_credentials(TlsFiles(certificate, key, None)))
    await server.start()
    allowed = access(tls_ca=authority.file, tls_name=name)
    client = AsyncClient(
        f"127.0.0.1:{port}", credentials=allowed.credentials, options=allowed.options, max_retries=0, timeout=20
    )
    try:
        async with client:
            if name is None:
                with pytest.raises(Unavailable):
                    await client.models()
            else:
                assert await client.models() == []
    finally:
        await server.stop(None)


@pytest.mark.usefixtures("unused_proxy")
async def test_commands_reach_a_server_without_the_proxy_of_the_web() -> None:
    server = grpc.aio.server()
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(Models(), server)  # type: ignore[abstract]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    allowed = access()
    try:
        with allowed.channel(f"127.0.0.1:{port}") as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            await asyncio.to_thread(stub.ListModels, generation_pb2.ListModelsRequest(), timeout=20)
        async with AsyncClient(f"127.0.0.1:{port}", **allowed.for_client, max_retries=0, timeout=20) as client:
            assert await client.models() == []
    finally:
        await server.stop(None)


def test_without_tls_there_is_no_name() -> None:
    with pytest.raises(typer.BadParameter, match="needs TLS"):
        access(tls_name=NAME)
