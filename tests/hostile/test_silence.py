"""A call that says nothing is ended: whoever opens streams and is silent keeps none of them for long."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import grpc
import pytest

from specdec.v1.trunk_pb2 import Begin, CarryRequest, CarryResponse, Frame
from tests.faults.cluster import Cluster, Models
from tests.hostile.attacks import CARRIED, CARRY
from tests.hostile.deployment import deployed

SILENT_CALLS = (
    ("verifier", "/specdec.v1.VerifierService/Verify"),
    ("verifier", "/specdec.v1.VerifierService/GetLoad"),
    ("draft", "/specdec.v1.DraftService/Draft"),
    ("orchestrator", "/specdec.v1.GenerationService/Generate"),
    ("orchestrator", "/specdec.v1.GenerationService/Complete"),
    ("orchestrator", "/specdec.v1.GenerationService/ListModels"),
)
"""Methods whose first message is waited for; a multiplexer may be silent, since it may have nothing to carry."""

ENDED_SECONDS = 14.0
"""Ten are granted for a first message."""

GOOD = {"FAILED_PRECONDITION", "DEADLINE_EXCEEDED", "INVALID_ARGUMENT", "CANCELLED", "UNAVAILABLE"}


@pytest.mark.timeout(300)
async def test_silent_calls_are_ended(models: Models, tmp_path: Path) -> None:
    async with deployed(models, tmp_path) as cluster:
        ends = await asyncio.gather(
            *(_silent_call(cluster, role, path) for role, path in SILENT_CALLS),
            *(_silent_stream(cluster, role) for role in CARRIED),
        )
    for name, status, seconds in ends:
        print(f"{name}: {status} after {seconds:.1f} s")
    assert [end for end in ends if end[1] not in GOOD] == []


async def _silent_call(cluster: Cluster, role: str, path: str) -> tuple[str, str, float]:
    """How a call ends in which nothing is said, and after how many seconds."""
    begun = time.monotonic()
    async with grpc.aio.insecure_channel(cluster.of(role)[0].address) as channel:
        call: Any = channel.stream_stream(path)()
        done, _ = await asyncio.wait({asyncio.ensure_future(call.code())}, timeout=ENDED_SECONDS)
        status = next(iter(done)).result().name if done else "still open"
        call.cancel()
    return path, status, time.monotonic() - begun


async def _silent_stream(cluster: Cluster, role: str) -> tuple[str, str, float]:
    """The same of a stream that a multiplexer carries."""
    method, _ = CARRIED[role]
    begun, status = time.monotonic(), "still open"
    async with grpc.aio.insecure_channel(cluster.of(role)[0].address) as channel:
        call: Any = channel.stream_stream(CARRY)()
        bundle = CarryRequest(frames=[Frame(stream=1, begin=Begin(method=method))])
        await call.write(bundle.SerializeToString())
        reading = asyncio.ensure_future(call.read())
        done, _ = await asyncio.wait({reading}, timeout=ENDED_SECONDS)
        if done:
            (frame,) = CarryResponse.FromString(reading.result()).frames
            status = {code.value[0]: code.name for code in grpc.StatusCode}[frame.end.code]
        call.cancel()
        await asyncio.wait({reading})
    return f"{method} in a multiplexer", status, time.monotonic() - begun
