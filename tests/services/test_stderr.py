"""Services that cannot write their log (full disk, closed pipe) keep serving."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from specdec.client import AsyncClient, InvalidRequest
from specdec.v2 import draft_pb2, verifier_pb2
from tests.faults.cluster import Cluster, Models
from tests.faults.pods import Pod
from tests.services.conftest import Directories


def full(pod: Pod) -> Callable[[], None]:
    """Log to a full disk."""
    pod.log = Path("/dev/full")
    return lambda: None


def left(pod: Pod) -> Callable[[], None]:
    """Log to a pipe; the returned function closes its reader."""
    os.mkfifo(pod.log)
    reader = os.open(pod.log, os.O_RDONLY | os.O_NONBLOCK)
    return lambda: os.close(reader)


@pytest.fixture(params=[full, pytest.param(left, marks=pytest.mark.verify)])
async def cluster(request: pytest.FixtureRequest, directories: Directories, tmp_path: Path) -> AsyncIterator[Cluster]:
    """One pod of each role, with little enough memory to cause preemptions."""
    models = Models(directories.target, directories.near, directories.target)
    with Cluster(models, tmp_path) as made:
        verifier, draft = made.verifier("--kv-tokens", "1024"), made.draft()
        made.orchestrator([verifier.address], [draft.address])
        leave = [request.param(pod) for pod in made.pods.values()]
        await made.make_whole()
        for each in leave:
            each()
        yield made


async def broken(address: str, method: str, messages: list[bytes]) -> grpc.StatusCode:
    """Return the status with which a session ends after these messages."""
    async with grpc.aio.insecure_channel(address) as channel:
        call: Any = channel.stream_stream(f"/specdec.v2.{method}")(iter(messages), timeout=30.0)  # type: ignore[arg-type]
        async for _ in call:
            pass
        code: grpc.StatusCode = await call.code()
        return code


async def test_services_serve_though_nothing_can_be_logged(cluster: Cluster) -> None:
    """Requests, refusals, sessions that break the protocol, preemptions: each logs something."""
    async with AsyncClient(cluster.address, timeout=60.0) as client:

        async def generate(number: int) -> list[int]:
            result = await client.complete(
                tokens=[50, 60, 70, number], max_tokens=200, ignore_end_token=True, temperature=0.8, seed=number
            )
            return result.completions[0].tokens

        alone = [await generate(number) for number in range(8)]
        together = await asyncio.gather(*(generate(number) for number in range(8)))
        assert list(together) == alone
        with pytest.raises(InvalidRequest):
            await client.complete(tokens=[5], temperature=-1.0)
        for pod, method, kind in (
            ("verifier-0", "VerifierService/Verify", verifier_pb2.VerifyRequest),
            ("draft-0", "DraftService/Draft", draft_pb2.DraftRequest),
        ):
            wrong = kind()
            wrong.open.SetInParent()
            address = cluster.pods[pod].address
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await broken(address, method, [wrong.SerializeToString()])
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await broken(address, method, [b"\xff\xff"])
            assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert await generate(0) == alone[0]
    assert cluster.died == []
