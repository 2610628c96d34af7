"""A client and services of different protocol versions refuse each other, and name the expected protocol."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest

from orchestrator.models.catalog import Catalog
from orchestrator.pods.pods import Pods
from orchestrator.servicer import GenerationServicer
from specdec.client import AsyncClient, Unimplemented
from specdec.serving.identity import PROTOCOL_VERSION
from specdec.v2 import generation_pb2, generation_pb2_grpc
from tests.services.conftest import Directories
from tests.stack import Stack, served, stack

OTHER = "specdec.v1"
SERVICES = {"GenerationService": "Generate", "DraftService": "Draft", "VerifierService": "Verify"}


@asynccontextmanager
async def of_another_version() -> AsyncIterator[str]:
    """Yield the address of a server with an earlier protocol's services, which answer nothing."""

    async def answer(requests: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.INTERNAL, "reached")

    server = grpc.aio.server()
    for service, method in SERVICES.items():
        handler: Any = grpc.stream_stream_rpc_method_handler(answer)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(f"{OTHER}.{service}", {method: handler}),)
        )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


@asynccontextmanager
async def before(services: Stack, **peers: Any) -> AsyncIterator[Any]:
    changed = replace(services.peers, failover_seconds=1.0, **peers)
    async with (
        served(GenerationServicer(Catalog.of(services.model, changed))) as (front, _),
        grpc.aio.insecure_channel(front) as channel,
    ):
        yield generation_pb2_grpc.GenerationServiceStub(channel)


def asked() -> generation_pb2.CompleteRequest:
    tokens = generation_pb2.TokenPrompt(ids=[5, 6, 7])
    request = generation_pb2.GenerateRequest(tokens=tokens, max_tokens=8, ignore_end_token=True)
    return generation_pb2.CompleteRequest(request=request)


def test_the_package_names_the_version() -> None:
    assert generation_pb2.DESCRIPTOR.package == f"specdec.v{PROTOCOL_VERSION}"


async def test_a_client_names_the_protocol_that_a_server_does_not_speak() -> None:
    async with of_another_version() as address, AsyncClient(address) as client:
        with pytest.raises(Unimplemented, match=r"another protocol version than this client, specdec\.v2"):
            await client.complete("hi")


async def test_an_older_client_is_refused(directories: Directories) -> None:
    async with stack(directories.target, None) as services, grpc.aio.insecure_channel(services.address) as channel:
        call: Any = channel.unary_unary(f"/{OTHER}.GenerationService/Complete")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(asked().SerializeToString())
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_verifier_of_another_version_is_told_from_one_that_is_lost(directories: Directories) -> None:
    async with (
        stack(directories.target, None) as services,
        of_another_version() as address,
        before(services, verifiers=Pods([address])) as stub,
    ):
        with pytest.raises(grpc.aio.AioRpcError, match=r"another protocol version than specdec\.v2") as error:
            await stub.Complete(asked())
    assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_draft_of_another_version_costs_no_token(directories: Directories) -> None:
    async with stack(directories.target, None) as services, of_another_version() as address:
        want = (await services.stub.Complete(asked())).completions[0].tokens
        async with before(services, drafts=Pods([address])) as stub:
            assert (await stub.Complete(asked())).completions[0].tokens == want
