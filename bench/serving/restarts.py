"""Measure the effects of dying servers on users, for specdec and for vLLM under the same schedule.

    python -m bench restarts --vllm-python build/vllm/bin/python [--seconds 180 --every 20]

Each system has two servers of the target: specdec has two verifiers, with two drafts and two orchestrators; vLLM has
two `vllm serve`. Requests arrive at Poisson times, at a rate that each system can serve without faults. Then one
process is killed (SIGKILL) every 20 s and restarted immediately: for specdec a pod of each role in turns, for vLLM its
servers in turns. (So each server of vLLM dies every 40 s, and each verifier every 120 s.) specdec's client library
resumes a text by itself. The client of vLLM acts like a patient application: it alternates between the servers, and
restarts a broken stream at another one from the beginning, for up to a minute.

It reports, without faults (calm) and with them: failed requests, texts that restarted in the user's view, texts that
differ from the calm ones of the same seed, times to the first token and between tokens, the longest silence in a text,
and tokens a second of complete texts.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import httpx2
import numpy as np

from bench import markdown
from bench.arguments import limit, parser_of
from bench.conditions import as_installed
from bench.serving.answers import at_poisson_times
from bench.serving.pods import Pod, running
from bench.systems import peer_options
from bench.systems.http_server import HOST, free_port
from bench.systems.vllm import ENVIRONMENT, server_command
from demo.prompts import held_out
from specdec.client import AsyncClient, SpecdecError
from specdec.local import DEMO, LocalError

TOKENS = 128
TEMPERATURE = 0.8
PROMPTS = 64
PATIENCE_SECONDS = 60.0
"""Maximum seconds of retries of a request while no server answers."""

AT_ONCE = 8
LOAD = 0.4
"""Load as a fraction of the slowest system's throughput with AT_ONCE requests in flight. It is low because, unlike on
separate machines, a starting process takes cores from the others."""

ROUND = ("verifier", "draft", "orchestrator")
"""Roles of specdec in the order of kills, one pod each time."""


@dataclass
class Seen:
    """One text, as its user saw it."""

    number: int
    begin: float
    times: list[float] = field(default_factory=list)  # arrival times of its pieces
    sizes: list[int] = field(default_factory=list)  # tokens of each piece
    text: str = ""
    begun_again: int = 0
    failed: bool = False

    def piece(self, text: str, tokens: int) -> None:
        self.times.append(time.monotonic())
        self.sizes.append(tokens)
        self.text += text


class System(Protocol):
    """Servers of the same target, and their client."""

    async def ask(self, seen: Seen) -> None:
        """Generate a text to its end; mark it if it fails."""

    def kill(self, turn: int) -> None:
        """Kill a process and restart it; LocalError if its last restart has failed."""

    async def ready(self) -> None:
        """Wait until all processes serve; LocalError if one does not."""


class Specdec:
    """Two verifiers, drafts and orchestrators."""

    def __init__(self, pods: dict[str, list[Pod]], client: AsyncClient) -> None:
        self._pods = pods
        self._client = client

    async def ask(self, seen: Seen) -> None:
        try:
            async with self._client.generate(
                tokens=prompt_of(seen.number),
                max_tokens=TOKENS,
                temperature=TEMPERATURE,
                seed=seen.number,
                ignore_end_token=True,
            ) as stream:
                async for chunk in stream:
                    seen.piece(chunk.text, len(chunk.tokens))
        except SpecdecError:
            seen.failed = True

    def kill(self, turn: int) -> None:
        role = ROUND[turn % len(ROUND)]
        pod = self._pods[role][turn // len(ROUND) % 2]
        if (how := pod.child.ending()) is not None:
            raise LocalError(f"a {role} did not restart: {how}")
        pod.child.process.kill()
        pod.child.process.wait()
        pod.restart()

    async def ready(self) -> None:
        for pod in itertools.chain.from_iterable(self._pods.values()):
            await asyncio.to_thread(pod.until_ready)


class VllmServer:
    """A `vllm serve` that is killed and restarted on the same port."""

    def __init__(self, python: str, target: Path, environment: dict[str, str]) -> None:
        port = free_port()
        options = ("--dtype", "float32", "--max-model-len", "1024", "--enforce-eager")
        self._command = server_command(python, target, port, *options)
        self._environment = environment
        self.address = f"http://{HOST}:{port}"
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            ("setpriv", "--pdeathsig", "KILL", *self._command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=self._environment,
            start_new_session=True,
        )

    def kill(self) -> None:
        """Kill it and its engine process."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Vllm:
    """Two `vllm serve`, used alternately as by a load balancer."""

    def __init__(self, servers: list[VllmServer], model: str, client: httpx2.AsyncClient) -> None:
        self._servers = servers
        self._model = model
        self._client = client
        self._turn = itertools.cycle(servers)

    async def ask(self, seen: Seen) -> None:
        give_up = seen.begin + PATIENCE_SECONDS
        while time.monotonic() < give_up:
            try:
                await self._stream(next(self._turn), seen)
                return
            except httpx2.HTTPError:
                if seen.text:
                    seen.begun_again += 1
                    seen.text = ""
                await asyncio.sleep(0.1)
        seen.failed = True

    async def _stream(self, server: VllmServer, seen: Seen) -> None:
        asked = {
            "model": self._model,
            "prompt": prompt_of(seen.number),
            "max_tokens": TOKENS,
            "temperature": TEMPERATURE,
            "seed": seen.number,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        done, before = False, 0
        async with self._client.stream("POST", f"{server.address}/v1/completions", json=asked) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                data = line.removeprefix("data: ") if line.startswith("data: ") else ""
                if data == "[DONE]":
                    done = True
                elif data and (told := json.loads(data))["choices"]:
                    tokens = told["usage"]["completion_tokens"]
                    seen.piece(told["choices"][0]["text"], tokens - before)
                    before = tokens
        if not done:
            raise httpx2.RemoteProtocolError("the stream broke off")

    def kill(self, turn: int) -> None:
        server = self._servers[turn % len(self._servers)]
        server.kill()
        server.start()

    async def ready(self) -> None:
        deadline = time.monotonic() + 300
        for server in self._servers:
            while True:
                try:
                    (await self._client.get(f"{server.address}/health")).raise_for_status()
                    break
                except httpx2.HTTPError:
                    if server.process.poll() is not None or time.monotonic() > deadline:
                        raise LocalError("vllm serve does not start") from None
                    await asyncio.sleep(0.2)


@cache
def prompts() -> list[list[int]]:
    return held_out(PROMPTS, tokens=64, seed=11)


def prompt_of(number: int) -> list[int]:
    return prompts()[number]


@asynccontextmanager
async def specdec() -> AsyncIterator[System]:
    with running() as pods:
        fronts = [pod.address for pod in pods["orchestrator"]]
        async with AsyncClient(fronts, timeout=PATIENCE_SECONDS, max_retries=20) as client:
            yield Specdec(pods, client)


@asynccontextmanager
async def vllm(python: str) -> AsyncIterator[System]:
    """Run two servers with a core each, like the verifiers, and without compilation, for a faster start."""
    target, servers = (DEMO / "target").resolve(), list[VllmServer]()
    try:
        for core in sorted(os.sched_getaffinity(0))[:2]:
            environment = as_installed(**ENVIRONMENT, VLLM_CPU_OMP_THREADS_BIND=str(core))
            servers.append(VllmServer(python, target, environment))
        async with httpx2.AsyncClient(timeout=PATIENCE_SECONDS) as client:
            system = Vllm(servers, str(target), client)
            await system.ready()
            yield system
    finally:
        for server in servers:
            server.kill()


async def in_turns(system: System, numbers: Sequence[int]) -> list[Seen]:
    """Request these texts, AT_ONCE at a time."""
    waiting, done = iter(numbers), list[Seen]()

    async def ask_on() -> None:
        for number in waiting:
            done.append(Seen(number, time.monotonic()))
            await system.ask(done[-1])

    await asyncio.gather(*(ask_on() for _ in range(AT_ONCE)))
    return done


async def capacity(system: System) -> float:
    """Return a system's throughput in texts a second with AT_ONCE in flight."""
    await in_turns(system, range(AT_ONCE))  # the first use is slow
    begin = time.monotonic()
    done = await in_turns(system, range(PROMPTS))
    if any(seen.failed for seen in done):
        raise SystemExit(f"{type(system).__name__} failed requests before any kill")
    return PROMPTS / (time.monotonic() - begin)


async def arrivals(system: System, rate: float, seconds: float) -> list[Seen]:
    """Send requests at Poisson times at `rate` per second for `seconds`; return the texts as seen by users."""
    asked, tasks, numbers = list[Seen](), list[asyncio.Task[None]](), itertools.cycle(range(PROMPTS))
    async for _ in at_poisson_times(rate, seconds, seed=3):
        asked.append(Seen(next(numbers), time.monotonic()))
        tasks.append(asyncio.create_task(system.ask(asked[-1])))
    await asyncio.gather(*tasks)
    return asked


async def kill_on(system: System, every: float) -> None:
    for turn in itertools.count():
        await asyncio.sleep(every)
        system.kill(turn)


def told(seen: Sequence[Seen], wants: Mapping[int, str], seconds: float) -> list[str]:
    """Return the cells of a row."""
    first = [each.times[0] - each.begin for each in seen if each.times]
    gaps = [
        (late - early) / max(1, size)
        for each in seen
        for (early, late), size in zip(pairwise(each.times), each.sizes[1:], strict=True)
        for _ in range(size)
    ]
    silences = [max((late - early for early, late in pairwise(each.times)), default=0.0) for each in seen]
    whole = [each for each in seen if not each.failed]
    tokens = TOKENS * len(whole)
    return [
        str(len(seen)),
        str(sum(each.failed for each in seen)),
        str(sum(each.begun_again > 0 for each in seen)),
        str(sum(each.text != wants.get(each.number) for each in whole)),
        _quantiles(first, "{:.2f}, {:.2f}"),
        _quantiles([1000 * gap for gap in gaps], "{:.1f}, {:.1f}"),
        f"{np.quantile(silences, 0.99):.1f}, {max(silences):.1f}" if silences else "-",
        f"{tokens / seconds:.0f}",
    ]


def _quantiles(values: Sequence[float], form: str) -> str:
    """Return the median and the 99th percentile; "-" if there are no values."""
    return form.format(*np.quantile(values, [0.5, 0.99])) if values else "-"


COLUMNS = (
    "texts",
    "failed",
    "begun again",
    "other text",
    "first token p50, p99, s",
    "between tokens p50, p99, ms",
    "longest silence p99, most, s",
    "tokens/s",
)


async def measure(
    systems: Mapping[str, Callable[[], AbstractAsyncContextManager[System]]], seconds: float, every: float
) -> tuple[str, list[str]]:
    """Return the table, and why kills ended early or a killed process did not restart."""
    most = {}
    for name, start in systems.items():
        async with start() as system:
            most[name] = await capacity(system)
    rate = LOAD * min(most.values())
    able = ", ".join(f"{name} {each:.2f}" for name, each in most.items())
    print(f"texts a second with {AT_ONCE} in flight: {able}; offered: {rate:.2f}", flush=True)
    rows, problems = [], []
    for name, start in systems.items():
        async with start() as system:
            wants = {seen.number: seen.text for seen in await in_turns(system, range(PROMPTS)) if not seen.failed}
            begin = time.monotonic()
            calm = await arrivals(system, rate, seconds / 3)
            rows.append([f"{name}, calm", *told(calm, wants, time.monotonic() - begin)])
            print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)
            killing = asyncio.create_task(kill_on(system, every))
            begin = time.monotonic()
            seen = await arrivals(system, rate, seconds)
            rows.append([f"{name}, killed", *told(seen, wants, time.monotonic() - begin)])
            print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)
            killing.cancel()
            try:
                with contextlib.suppress(asyncio.CancelledError):
                    await killing  # raises its error, if any
                await system.ready()
            except (LocalError, OSError) as error:
                problems.append(f"{name}: {error}")
    return "\n".join(markdown.table(["", *COLUMNS], rows)), problems


def main(given: Sequence[str]) -> None:
    parser = parser_of("restarts", __doc__)
    parser.add_argument("--vllm-python", type=os.path.abspath, help="interpreter of an environment with vllm-cpu")
    parser.add_argument(
        "--seconds", type=float, default=180.0, help="seconds with kills, after a third as long without"
    )
    parser.add_argument("--every", type=float, default=20.0, help="seconds from one kill to the next")
    args = parser.parse_args(given)
    limit(parser, args, 10, "seconds")
    limit(parser, args, 1, "every")
    systems: dict[str, Callable[[], AbstractAsyncContextManager[System]]] = {"specdec": specdec}
    if (python := peer_options.vllm_python(parser, args)) is not None:
        systems["vllm serve"] = partial(vllm, python)
    table, problems = asyncio.run(measure(systems, args.seconds, args.every))
    print(table)
    if problems:
        sys.exit("\n".join(problems))
