"""No input stops the HTTP server, or provokes a status that means a bug.

A hundred thousand requests take some minutes: python -m pytest -s -m verify tests/hostile/test_http.py
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import re
import sys
from collections import Counter
from pathlib import Path
from statistics import median

import openai
import pytest

from tests.faults.cluster import Models
from tests.hostile.http_requests import attack
from tests.hostile.vitals import BUG, resident_mib
from tests.stack import Stack, stack, until

SEED = 2026
ROUNDS = 10
"""As for gRPC: compare the median memory of rounds 3 to 5 with that of the last three."""

AT_ONCE = 24
PATIENCE = 1.0
"""Seconds for which an attacker waits for an answer; the server waits longer for missing input."""

PROPER = frozenset({100, 200, 400, 404, 405, 413, 429, 431, 501, 503})
MAX_GROWTH_MIB = 16.0
MAX_LOG_BYTES = 20_000_000

STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")


async def _status(reader: asyncio.StreamReader) -> int | str:
    """Read a whole response; return its status."""
    answer = await reader.read()
    found = STATUS.match(answer)
    return int(found[1]) if found else "no status" if answer else "closed"


class Attackers:
    """Many concurrent attackers with one connection each."""

    def __init__(self, address: str) -> None:
        self._host, _, port = address.partition(":")
        self._port = int(port)
        self._numbers = itertools.count()
        self.statuses: Counter[tuple[str, int | str]] = Counter()
        self.improper: list[str] = []

    async def run(self, attacks: int) -> None:
        goal = attacks + sum(self.statuses.values())
        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(self._attack_on(goal))

    async def _attack_on(self, goal: int) -> None:
        while sum(self.statuses.values()) < goal:
            number = next(self._numbers)
            kind, generator, sent = attack(SEED, number)
            status = await self._made(sent, generator)
            self.statuses[kind, status] += 1
            if isinstance(status, int) and status not in PROPER:
                self.improper.append(f"attack {number}: {kind}, {status}")

    async def _made(self, sent: bytes, generator: random.Random) -> int | str:
        """Send the bytes whole, in two parts, or partially; read the response or leave."""
        manner = generator.choice(("whole", "whole", "whole", "parts", "half", "leave"))
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            with contextlib.suppress(ConnectionError):
                at = generator.randrange(len(sent) + 1)
                writer.write(sent if manner in ("whole", "leave") else sent[:at])
                await writer.drain()
                if manner == "parts":
                    await asyncio.sleep(0.001)
                    writer.write(sent[at:])
                if manner == "leave":
                    return "left"
                if manner == "half":
                    writer.write_eof()
                return await asyncio.wait_for(_status(reader), PATIENCE)
            return "closed"
        except TimeoutError:
            return "gave up"
        finally:
            writer.transport.abort()

    def report(self) -> str:
        rows = [f"{kind} {status}: {count}" for (kind, status), count in sorted(self.statuses.items(), key=str)]
        return f"{sum(self.statuses.values())} requests; " + ", ".join(rows)


@pytest.mark.parametrize(
    "attacks",
    [
        pytest.param(1_500, marks=pytest.mark.timeout(300)),
        pytest.param(100_000, marks=[pytest.mark.verify, pytest.mark.timeout(2400)]),
    ],
)
async def test_nothing_that_arrives_stops_it(models: Models, tmp_path: Path, attacks: int) -> None:
    log = tmp_path / "log"
    async with stack(models.target, models.draft) as services:
        command = (sys.executable, "-m", "specdec.openai_api", "--port", "0", "--orchestrator", services.address)
        with log.open("wb") as errors:
            process = await asyncio.create_subprocess_exec(*command, stdin=-1, stdout=-1, stderr=errors)
        try:
            assert process.stdout is not None
            _, address = (await asyncio.wait_for(process.stdout.readline(), 60)).decode().split()
            attackers = Attackers(address)
            weights = [await weight_after(attackers, services, process.pid, attacks // ROUNDS) for _ in range(ROUNDS)]
            assert process.returncode is None
            async with openai.AsyncOpenAI(base_url=f"http://{address}/v1", api_key="key", max_retries=0) as client:
                answer = await client.completions.create(model=services.model.name, prompt=[5, 6, 7])
            assert answer.usage is not None
        finally:
            if process.returncode is None:
                process.terminate()
            await asyncio.wait_for(process.communicate(), 60)
    growth = median(weights[-3:]) - median(weights[2:5])
    sizes = " ".join(f"{each:.0f}" for each in weights)
    print(f"\n{attackers.report()}\n{sizes} MiB, {growth:+.1f} since the warm-up, {log.stat().st_size:,} bytes of log")
    assert process.returncode == 0
    assert [line for line in log.read_bytes().splitlines() if BUG.search(line)][:3] == []
    assert attackers.improper == []
    answered = [status for _, status in attackers.statuses.elements() if isinstance(status, int)]
    assert {200, 400, 404, 405} <= set(answered)
    assert len(answered) > attacks / 2
    assert log.stat().st_size < MAX_LOG_BYTES
    assert growth < MAX_GROWTH_MIB


async def weight_after(attackers: Attackers, services: Stack, pid: int, attacks: int) -> float:
    """Return the server's memory in MiB after `attacks` requests, once no session is open anywhere."""
    await attackers.run(attacks)
    await until(lambda: services.idle, 30)
    return resident_mib(pid)
