"""Silent calls are ended: no caller keeps streams open without sending."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from specdec.v2.mux_pb2 import Begin, ConnectRequest, ConnectResponse, Frame
from tests.faults.cluster import Cluster, Models
from tests.hostile.attacks import CARRIED, CARRY
from tests.hostile.deployment import deployed
from tests.hostile.tally import NAMES

SESSIONS = (
    ("verifier", "/specdec.v2.VerifierService/Verify"),
    ("draft", "/specdec.v2.DraftService/Draft"),
)
SINGLE_REQUESTS = (
    ("verifier", "/specdec.v2.VerifierService/GetStats"),
    ("draft", "/specdec.v2.DraftService/GetStats"),
    ("orchestrator", "/specdec.v2.GenerationService/Generate"),
    ("orchestrator", "/specdec.v2.GenerationService/Complete"),
    ("orchestrator", "/specdec.v2.GenerationService/ListModels"),
    ("orchestrator", "/specdec.v2.GenerationService/Tokenize"),
    ("orchestrator", "/specdec.v2.GenerationService/GetStats"),
)
"""Methods whose first message is awaited; a multiplexer may be silent while it has nothing to carry."""

SESSION_SECONDS = 14.0
"""The limit for a session's first message is ten."""

SINGLE_REQUEST_SECONDS = 36.0
"""The limit for a request is thirty: it may be long and come over a slow line."""

GOOD = {"FAILED_PRECONDITION", "DEADLINE_EXCEEDED", "INVALID_ARGUMENT", "CANCELLED", "UNAVAILABLE"}


@dataclass(frozen=True)
class End:
    """How a call ended, and after how many seconds."""

    call: str
    status: str
    seconds: float


@pytest.mark.timeout(300)
async def test_silent_sessions_are_ended(models: Models, tmp_path: Path) -> None:
    async with deployed(models, tmp_path) as deployment:
        cluster = deployment.cluster
        ends = await asyncio.gather(
            *(_silent_call(cluster, role, path, SESSION_SECONDS) for role, path in SESSIONS),
            *(_silent_stream(cluster, role, SESSION_SECONDS) for role in CARRIED),
        )
    print(*ends, sep="\n")
    assert [end for end in ends if end.status not in GOOD] == []


@pytest.mark.verify
@pytest.mark.timeout(300)
async def test_silent_requests_are_ended(models: Models, tmp_path: Path) -> None:
    async with deployed(models, tmp_path) as deployment:
        cluster = deployment.cluster
        ends = await asyncio.gather(
            *(_silent_call(cluster, role, path, SINGLE_REQUEST_SECONDS) for role, path in SINGLE_REQUESTS)
        )
    print(*ends, sep="\n")
    assert [end for end in ends if end.status not in GOOD] == []


async def _silent_call(cluster: Cluster, role: str, path: str, most_seconds: float) -> End:
    """Send nothing in a call."""
    begun = time.monotonic()
    async with grpc.aio.insecure_channel(cluster.of(role)[0].address) as channel:
        call: Any = channel.stream_stream(path)()
        done, _ = await asyncio.wait({asyncio.ensure_future(call.code())}, timeout=most_seconds)
        status = next(iter(done)).result().name if done else "still open"
        call.cancel()
    return End(path, status, time.monotonic() - begun)


async def _silent_stream(cluster: Cluster, role: str, most_seconds: float) -> End:
    """Send nothing in a multiplexed stream."""
    method, _ = CARRIED[role]
    begun, status = time.monotonic(), "still open"
    async with grpc.aio.insecure_channel(cluster.of(role)[0].address) as channel:
        call: Any = channel.stream_stream(CARRY)()
        bundle = ConnectRequest(frames=[Frame(stream=1, begin=Begin(method=method))])
        await call.write(bundle.SerializeToString())
        reading = asyncio.ensure_future(call.read())
        done, _ = await asyncio.wait({reading}, timeout=most_seconds)
        if done:
            (frame,) = ConnectResponse.FromString(reading.result()).frames
            status = NAMES[frame.end.code]
        call.cancel()
        await asyncio.wait({reading})
    return End(f"{method} in a multiplexer", status, time.monotonic() - begun)
