"""Callers without a key do no harm: beside an attacker, two tenants get all their answers, about as fast as alone.

    python -m pytest -s -m verify tests/hostile/test_without_a_key.py

The attacker shares this machine's cores with its target, so it runs at the lowest priority and at bounded rates. A
minute of each attack takes five minutes in all; SPECDEC_ATTACK_SECONDS changes the minute.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import openai
import pytest

from specdec import api_keys
from specdec.client import AsyncClient
from tests.faults.cluster import Cluster, Models

SECONDS = float(os.environ.get("SPECDEC_ATTACK_SECONDS", "60"))
REQUESTS_A_SECOND = 5.0
"""Per tenant, open loop: 300 in a minute, so that several lie above the 99th percentile."""

REQUESTS_A_CONNECTION = 5
"""Callers reconnect: under attack, new connections are the ones most easily shut out."""

PATIENCE = 30.0
MAX_SLOWDOWN = 3.0
QUANTILE = 0.99
PROMPT, TOKENS = "the quick brown fox", 8

Attack = Callable[[str, str], Sequence[str]]
"""Returns the command of an attack on an orchestrator and a server of the OpenAI API."""


def grpc_attack(kind: str, rate: int) -> Attack:
    """Return an attack of `keyless_grpc.py` on the orchestrator."""
    options = (kind, "--rate", str(rate), "--seconds", str(SECONDS))
    return lambda orchestrator, front: ("tests.hostile.keyless_grpc", orchestrator, *options)


def http_attack(orchestrator: str, front: str) -> Sequence[str]:
    """Held bodies, and more idle connections than the OpenAI server has places."""
    return ("tests.hostile.keyless_http", front, "8", "1100", str(SECONDS))


ATTACKS: dict[str, Sequence[Attack]] = {
    "rapid resets": [grpc_attack("reset", 17_000)],
    "refused calls": [grpc_attack("whole", 4_000)],
    "held bodies, idle connections": [http_attack],
    "all together": [grpc_attack("reset", 4_000), grpc_attack("whole", 4_000), http_attack],
}


@dataclass
class Answers:
    """A tenant's results: seconds until each answer, and failures."""

    seconds: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def quantile(self) -> float:
        return sorted(self.seconds)[int(QUANTILE * (len(self.seconds) - 1))]


Ask = Callable[[], Awaitable[object]]


class GrpcTenant:
    """A tenant of the orchestrator itself."""

    def __init__(self, address: str, key: str) -> None:
        self._address, self._key = address, key

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[Ask]:
        options = (("grpc.use_local_subchannel_pool", 1),)  # not the connection of another client
        async with AsyncClient(
            self._address, api_key=self._key, timeout=PATIENCE, max_retries=0, options=options
        ) as client:
            yield lambda: client.complete(PROMPT, max_tokens=TOKENS, temperature=0.0, ignore_end_token=True)


class HttpTenant:
    """A tenant of the OpenAI API."""

    def __init__(self, address: str, key: str, model: str) -> None:
        self._address, self._key, self._model = address, key, model

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[Ask]:
        async with openai.AsyncOpenAI(
            base_url=f"http://{self._address}/v1", api_key=self._key, max_retries=0, timeout=PATIENCE
        ) as client:
            yield lambda: client.completions.create(
                model=self._model, prompt=PROMPT, max_tokens=TOKENS, temperature=0.0
            )


async def asked(tenant: GrpcTenant | HttpTenant, seconds: float) -> Answers:
    """Send requests at a fixed rate for `seconds`."""
    answers = Answers()
    begun = time.monotonic()

    async def ask_once(ask: Ask) -> None:
        sent = time.monotonic()
        try:
            await ask()
        except Exception as error:  # of any kind: all are failures
            answers.errors.append(f"{time.monotonic() - begun:.1f} s: {type(error).__name__}: {error}"[:300])
        else:
            answers.seconds.append(time.monotonic() - sent)

    async with AsyncExitStack() as connections, asyncio.TaskGroup() as group:
        for number in range(int(seconds * REQUESTS_A_SECOND)):
            await asyncio.sleep(begun + number / REQUESTS_A_SECOND - time.monotonic())
            if number % REQUESTS_A_CONNECTION == 0:
                ask = await connections.enter_async_context(tenant.connected())
            group.create_task(ask_once(ask))
    return answers


@asynccontextmanager
async def front_of(orchestrator: str, log: Path) -> AsyncIterator[str]:
    """Yield the address of a server of the OpenAI API."""
    command = (sys.executable, "-m", "specdec.openai_api", "--port", "0", "--orchestrator", orchestrator)
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(*command, stdin=-1, stdout=-1, stderr=errors)
    try:
        assert process.stdout is not None
        _, address = (await asyncio.wait_for(process.stdout.readline(), 60)).decode().split()
        yield address
    finally:
        if process.returncode is None:
            process.terminate()
        await asyncio.wait_for(process.communicate(), 60)


@asynccontextmanager
async def attacked(command: Sequence[str]) -> AsyncIterator[None]:
    """Run an attack during the context; it ends by itself, or when its stdin is closed."""
    program = ("nice", "-n", "19", sys.executable, "-m", *command)
    process = await asyncio.create_subprocess_exec(*program, stdin=-1, stdout=-1)
    try:
        yield
        said, _ = await asyncio.wait_for(process.communicate(b""), PATIENCE)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, command
    print(f"\n{' '.join(command)}: {said.decode().strip()}", end="")


@pytest.mark.verify
@pytest.mark.timeout(3600)
async def test_who_has_no_key_costs_nobody_anything(models: Models, tmp_path: Path) -> None:
    keys = {name: api_keys.new() for name in ("one", "other")}
    lines = [f"  {name}: {{api_keys: ['{api_keys.hash_of(key)}']}}" for name, key in keys.items()]
    tenants = tmp_path / "tenants.yaml"
    tenants.write_text("\n".join(["tenants:", *lines]) + "\n")
    with Cluster(models, tmp_path) as cluster:
        verifier = cluster.verifier().address
        orchestrator = cluster.orchestrator([verifier], [], "--tenants", str(tenants)).address
        await cluster.make_whole()
        async with front_of(orchestrator, tmp_path / "front.log") as front:
            callers = (GrpcTenant(orchestrator, keys["one"]), HttpTenant(front, keys["other"], models.target.name))
            await asyncio.gather(*(asked(caller, 3.0) for caller in callers))  # imports and compilation happen first
            alone = await asyncio.gather(*(asked(caller, SECONDS) for caller in callers))
            assert [answers.errors for answers in alone] == [[], []]
            problems = []
            for name, attacks in ATTACKS.items():
                async with AsyncExitStack() as attackers:
                    for attack in attacks:
                        await attackers.enter_async_context(attacked(attack(orchestrator, front)))
                    beside = await asyncio.gather(*(asked(caller, SECONDS) for caller in callers))
                for before, after in zip(alone, beside, strict=True):
                    slowdown = after.quantile / before.quantile
                    times = f"{1e3 * before.quantile:.0f} ms alone, {1e3 * after.quantile:.0f} ms now"
                    counts = f"{len(after.seconds)} answers, {len(after.errors)} errors"
                    print(f"\n{name}: {counts}, p99 {times}: {slowdown:.1f} times", end="")
                    problems += [f"{name}: {error}" for error in after.errors[:3]]
                    if slowdown > MAX_SLOWDOWN:
                        problems.append(f"{name}: {slowdown:.1f} times as slow")
            print()
        assert cluster.died == []
    assert problems == []
