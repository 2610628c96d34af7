"""With a tenants file, every call needs an API key, which determines its tenant."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from demo.train import HOME
from orchestrator.models.catalog import Catalog
from orchestrator.pods.peers import Peers
from orchestrator.pods.pods import Pods
from orchestrator.requests.model import ServedModel
from orchestrator.servicer import GenerationServicer
from orchestrator.tenants import accounts as accounts_module
from orchestrator.tenants.accounts import Accounts
from orchestrator.tenants.file import TenantsFile
from specdec import AsyncClient, api_keys
from specdec.client.errors import AccessDenied, Overloaded
from specdec.engine.model_directory import ModelDirectory
from specdec.v2 import generation_pb2, generation_pb2_grpc, trace_pb2, trace_pb2_grpc
from tests.captured_logs import captured_logs
from tests.stack import served, until

MODEL = ServedModel.of(ModelDirectory(HOME / "target"))
ACME, WATCHER = "acme's key", "watcher's key"
ASK_SECONDS = 0.02
"""Pause between two tries of a key that may not be known yet: too many refused calls would close the connection."""

METHODS = {
    "Generate": generation_pb2.GenerateRequest,
    "Complete": generation_pb2.CompleteRequest,
    "ListModels": generation_pb2.ListModelsRequest,
    "Tokenize": generation_pb2.TokenizeRequest,
    "GetStats": generation_pb2.GenerationServiceGetStatsRequest,
}


class Site:
    """An orchestrator without verifiers, and its tenants file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.write(f"acme: {{api_keys: ['{api_keys.hash_of(ACME)}']}}")

    def write(self, *tenants: str) -> None:
        """Replace the file; the operator `watcher` stays in it."""
        watcher = f"watcher: {{api_keys: ['{api_keys.hash_of(WATCHER)}'], operator: true}}"
        new = self.path.with_suffix(".new")
        new.write_text("tenants:\n" + "".join(f"  {each}\n" for each in (watcher, *tenants)))
        os.replace(new, self.path)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path / "tenants.yaml")


@pytest.fixture
async def address(site: Site, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    monkeypatch.setattr(accounts_module, "RELOAD_SECONDS", 0.05)
    accounts = Accounts(TenantsFile(site.path))
    await accounts.start()
    async with served(GenerationServicer(Catalog.of(MODEL, Peers(Pods())), accounts=accounts)) as (address, _):
        yield address


async def status(address: str, method: str, *metadata: tuple[str, str | bytes]) -> tuple[grpc.StatusCode, str]:
    """Return the status code and message of a call with an empty request."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
        call = getattr(stub, method)(METHODS[method](), metadata=metadata, timeout=20)
        return await call.code(), await call.details()


def test_every_method_is_tried() -> None:
    (service,) = generation_pb2.DESCRIPTOR.services_by_name.values()
    assert set(METHODS) == {method.name for method in service.methods}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("metadata", "why"),
    [
        ((), "is missing"),
        ((("authorization", ACME),), "as `Bearer` and an API key"),
        ((("authorization", f"Basic {ACME}"),), "as `Bearer` and an API key"),
        ((("authorization", f"Bearer {ACME}"), ("authorization", f"Bearer {ACME}")), "given once"),
        ((("authorization", "Bearer "),), "unknown API key"),
        ((("authorization", f"Bearer {ACME}x"),), "unknown API key"),
        ((("authorization", f"Bearer {api_keys.hash_of(ACME)}"),), "unknown API key"),
        ((("authorization", "Bearer " + "x" * 4000),), "unknown API key"),
    ],
)
async def test_no_call_is_served_without_a_key_that_is_known(
    address: str, method: str, metadata: tuple[tuple[str, str], ...], why: str
) -> None:
    code, message = await status(address, method, *metadata)
    assert code is grpc.StatusCode.UNAUTHENTICATED
    assert why in message
    assert ACME not in message


async def test_a_key_is_asked_for_before_anything_is_read(address: str) -> None:
    """Without a key, not even an undecodable request is decoded."""
    async with grpc.aio.insecure_channel(address) as channel:
        ask: Any = channel.unary_unary("/specdec.v2.GenerationService/Tokenize")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await ask(b"\xff\xff")
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_call_with_a_key_is_served(address: str) -> None:
    async with AsyncClient(address, api_key=ACME) as client:
        assert await client.models()
    code, _ = await status(address, "ListModels", ("authorization", f"BEARER  {ACME}"))  # as HTTP spells it
    assert code is grpc.StatusCode.OK


async def test_a_key_opens_its_own_tenant_alone(address: str) -> None:
    async with AsyncClient(address, api_key=ACME) as client:
        with pytest.raises(AccessDenied, match="tenant: is 'other', the API key belongs to 'acme'") as refused:
            await client.complete("x", tenant="other")
        assert (refused.value.code, refused.value.reason) == (grpc.StatusCode.PERMISSION_DENIED, "WRONG_TENANT")


async def test_a_tenant_has_to_permit_learning_too(address: str) -> None:
    async with AsyncClient(address, api_key=ACME) as client:
        with pytest.raises(AccessDenied, match="learn: is set, the tenant 'acme' does not permit it") as refused:
            await client.complete("x", learn=True)
        assert refused.value.reason == "LEARNING_NOT_PERMITTED"


async def test_only_operators_see_what_concerns_all(address: str) -> None:
    code, message = await status(address, "GetStats", ("authorization", f"Bearer {ACME}"))
    assert (code, message) == (
        grpc.StatusCode.PERMISSION_DENIED,
        "tenant 'acme' is not an operator (`operator: true` in the tenants file)",
    )
    assert (await status(address, "GetStats", ("authorization", f"Bearer {WATCHER}")))[0] is grpc.StatusCode.OK


async def test_only_operators_see_traces(address: str) -> None:
    """Traces describe any request whose id is known."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = trace_pb2_grpc.TraceServiceStub(channel)
        codes = []
        for metadata in ((), (("authorization", f"Bearer {ACME}"),), (("authorization", f"Bearer {WATCHER}"),)):
            call = stub.GetTrace(trace_pb2.GetTraceRequest(request_id="any"), metadata=metadata, timeout=20)
            codes.append(await call.code())
    assert codes == [grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.NOT_FOUND]


async def test_keys_and_limits_change_without_a_restart(address: str, site: Site) -> None:
    async def code(key: str) -> grpc.StatusCode:
        return (await status(address, "ListModels", ("authorization", f"Bearer {key}")))[0]

    async def until_code(key: str, wanted: grpc.StatusCode) -> None:
        while await code(key) is not wanted:  # ended by the test's own time limit
            await asyncio.sleep(ASK_SECONDS)

    assert await code("new") is grpc.StatusCode.UNAUTHENTICATED
    site.write(f"acme: {{api_keys: ['{api_keys.hash_of(ACME)}', '{api_keys.hash_of('new')}']}}")
    await until_code("new", grpc.StatusCode.OK)
    assert await code(ACME) is grpc.StatusCode.OK  # both keys are valid during a key change
    site.write(f"acme: {{api_keys: ['{api_keys.hash_of('new')}'], requests_per_minute: 1}}")
    await until_code(ACME, grpc.StatusCode.UNAUTHENTICATED)
    async with AsyncClient(address, api_key="new") as client:
        await client.tokenize("x")
        with pytest.raises(Overloaded, match="requests_per_minute is 1, used up") as refused:
            await client.tokenize("x")
    assert refused.value.reason == "TENANT_LIMIT"
    assert refused.value.retry_after == pytest.approx(60, abs=5)


async def test_a_wrong_file_changes_nothing(address: str, site: Site) -> None:
    with captured_logs() as logs:
        site.write("acme: {}")
        await until(lambda: any(each["event"] == "files_refused" for each in logs))
    assert (await status(address, "ListModels", ("authorization", f"Bearer {ACME}")))[0] is grpc.StatusCode.OK


async def test_a_limit_is_told_as_google_rpc_has_it(address: str, site: Site) -> None:
    site.write(f"acme: {{api_keys: ['{api_keys.hash_of('new')}'], requests_per_minute: 1}}")
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
        while True:
            try:
                await stub.Tokenize(
                    generation_pb2.TokenizeRequest(text="x"), metadata=(("authorization", "Bearer new"),)
                )
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                    rich = rpc_status.from_call(error)
                    break
                await asyncio.sleep(ASK_SECONDS)
    quota = error_details_pb2.QuotaFailure()
    assert any(detail.Unpack(quota) for detail in rich.details)
    (violation,) = quota.violations
    assert violation.subject == "tenant:acme"
    assert "requests_per_minute is 1, used up" in violation.description


async def test_a_request_for_more_texts_than_its_tenant_may_have_is_refused(tmp_path: Path) -> None:
    site = Site(tmp_path / "tenants.yaml")
    site.write(f"acme: {{api_keys: ['{api_keys.hash_of(ACME)}'], max_concurrent_requests: 4}}")
    accounts = Accounts(TenantsFile(site.path))
    servicer = GenerationServicer(Catalog.of(MODEL, Peers(Pods())), accounts=accounts)
    async with served(servicer) as (address, _), grpc.aio.insecure_channel(address) as channel:
        stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
        request = generation_pb2.GenerateRequest(tokens=generation_pb2.TokenPrompt(ids=[3]), n=5)
        call = stub.Complete(
            generation_pb2.CompleteRequest(request=request),
            metadata=(("authorization", f"Bearer {ACME}"),),
            timeout=20,
        )
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "n: is 5, must be at most 4, max_concurrent_requests" in await call.details()
