"""Measure how many session-steps an orchestrator relays per second, and per second of its processor time.

    python -m bench capacity

A session-step is one commit, relayed to the draft and (coalesced over 20 ms) to the client, plus the draft's
candidates, relayed to the verifier. Verifier and draft compute nothing (`bench.network.echo`, one process); the client
(this process) reads only the number of steps in each message. All processes share the machine's cores, so steps are
divided by the orchestrator's measured processor time. Sessions share up to 16 client connections. Before that, a lone
session's round trip is measured twice: through the orchestrator (two links each way), and directly to the draft (one).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from bench import markdown
from bench.arguments import limit, parser_of
from bench.network.echo import before
from bench.systems.processor_time import Watch
from specdec.v2 import draft_pb2, draft_pb2_grpc, generation_pb2, model_pb2
from testing.processes import children_of, started

GENERATE = "/specdec.v2.GenerationService/Generate"
REQUEST = generation_pb2.GenerateRequest(tokens=generation_pb2.TokenPrompt(ids=[5]), max_tokens=1000)
CONNECTIONS = 16
SETTLE_SECONDS = 1.5
"""Seconds until all sessions are open and running."""
DIRECT_ROUNDS = 400
COLUMNS = (
    "workers",
    "sessions",
    "steps a second",
    "cores: orchestrator",
    "echo",
    "client",
    "others",
    "steps a second a core",
)


class Client:
    """A client that keeps `sessions` sessions running and counts their steps."""

    def __init__(self, address: str, sessions: int) -> None:
        self._address = address
        self._sessions = sessions
        self.steps = 0

    async def run(self) -> None:
        """Run sessions until cancelled."""
        apart = (("grpc.use_local_subchannel_pool", 1),)
        async with contextlib.AsyncExitStack() as exits, asyncio.TaskGroup() as group:
            channels = [
                await exits.enter_async_context(grpc.aio.insecure_channel(self._address, options=apart))
                for _ in range(min(self._sessions, CONNECTIONS))
            ]
            for number in range(self._sessions):
                group.create_task(self._read(channels[number % len(channels)], REQUEST.SerializeToString()))

    async def _read(self, channel: grpc.aio.Channel, request: bytes) -> None:
        while True:
            call: Any = channel.unary_stream(GENERATE)(request)  # type: ignore[arg-type]
            while (message := await call.read()) is not grpc.aio.EOF:
                self.steps += generation_pb2.GenerateResponse.FromString(message).steps


@dataclass(frozen=True)
class Rate:
    steps: float  # per second
    orchestrator: float  # cores used
    echo: float
    client: float
    strangers: float

    @property
    def per_core(self) -> float:
        return self.steps / self.orchestrator


async def direct_round(address: str) -> float:
    """Return the median seconds of a round (a commit and its candidates) over one stream without an orchestrator."""
    seconds = []
    async with grpc.aio.insecure_channel(address) as channel:
        call: Any = draft_pb2_grpc.DraftServiceStub(channel).Draft()  # type: ignore[call-arg]
        await call.write(draft_pb2.DraftRequest(open=draft_pb2.DraftOpen()))
        await call.read()
        for base in range(DIRECT_ROUNDS):
            begin = time.perf_counter()
            committed = model_pb2.Committed(base=base, tokens=[5, 5])
            await call.write(draft_pb2.DraftRequest(committed=committed))
            await call.read()
            seconds.append(time.perf_counter() - begin)
        call.cancel()
    return statistics.median(seconds)


async def relayed_round(address: str) -> float:
    """Return the median seconds of a round of a single session through the orchestrator. A message with several steps
    counts once, with their mean."""
    async with grpc.aio.insecure_channel(address) as channel:
        request = REQUEST.SerializeToString()
        call: Any = channel.unary_stream(GENERATE)(request)  # type: ignore[arg-type]
        await call.read()  # all streams are open
        before, seconds = time.perf_counter(), list[float]()
        while (message := await call.read()) is not grpc.aio.EOF:
            now = time.perf_counter()
            if steps := generation_pb2.GenerateResponse.FromString(message).steps:
                seconds.append((now - before) / steps)
                before = now
        return statistics.median(seconds)


async def measure(address: str, orchestrator: Iterable[int], echo: int, sessions: int, seconds: float) -> Rate:
    client = Client(address, sessions)
    running = asyncio.create_task(client.run())
    await asyncio.sleep(SETTLE_SECONDS)
    relaying, echoing = Watch({}, orchestrator), Watch({}, [echo])
    everybody = Watch({}, [echo, *orchestrator])
    begin, own, steps = time.perf_counter(), sum(os.times()[:2]), client.steps
    await asyncio.sleep(seconds)
    used = relaying.cores()[1], echoing.cores()[1], sum(os.times()[:2]) - own, everybody.cores()[2]
    passed, steps = time.perf_counter() - begin, client.steps - steps
    if running.done():
        await running
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    return Rate(steps / passed, used[0], used[1], used[2] / passed, used[3])


async def measure_all(args: argparse.Namespace) -> None:
    rates: dict[tuple[int, int], list[Rate]] = defaultdict(list)
    async with contextlib.AsyncExitStack() as exits:
        echo, peers = await exits.enter_async_context(started("bench.network.echo"))
        pods = []
        for workers in args.workers:
            program = before(peers, "--workers", str(workers), "--drain-seconds", "1")
            pid, address = await exits.enter_async_context(started(*program))
            pods.append((workers, [pid, *children_of(pid)], address))
        direct, relayed = await direct_round(peers), await relayed_round(pods[0][2])
        for _ in range(args.rounds):
            for workers, processes, address in pods:
                for sessions in args.sessions:
                    rate = await measure(address, processes, echo, sessions, args.seconds)
                    rates[workers, sessions].append(rate)
    report(rates)
    print(f"\nA lone session's round: {1e3 * relayed:.2f} ms through the orchestrator, {1e3 * direct:.2f} ms without.")


def report(rates: dict[tuple[int, int], list[Rate]]) -> None:
    """Print a Markdown table of medians; for the rate per core, also the minimum and the maximum."""
    print(markdown.head(COLUMNS))
    for (workers, sessions), measured in rates.items():
        median = {name: statistics.median(getattr(rate, name) for rate in measured) for name in Rate.__annotations__}
        cores = (f"{median[name]:.2f}" for name in ("orchestrator", "echo", "client", "strangers"))
        per_core = sorted(rate.per_core for rate in measured)
        spread = f"{statistics.median(per_core):.0f} ({per_core[0]:.0f} to {per_core[-1]:.0f})"
        print(markdown.row([workers, sessions, f"{median['steps']:.0f}", *cores, spread]))


def main(given: Sequence[str]) -> None:
    parser = parser_of("capacity", __doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(given)
    limit(parser, args, 1, "workers", "sessions", "rounds")
    limit(parser, args, 0.1, "seconds")
    asyncio.run(measure_all(args))
