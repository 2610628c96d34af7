"""Measure the cost of distance between the services, for this system, which drafts ahead, and for a synchronous one.

    python -m bench delay
    python -m bench delay --target-step-ms 30 --draft-step-ms 3    # a larger pair on simulated devices

Both links of the orchestrator, to the verifier and to the draft, are delayed (`testing.delay_process`). A round trip on
each takes 0 to 1 target steps, so a round trip from verifier to draft takes twice as long. The client's link is not
delayed. The target step is this run's median without delay.

This system also uses its verifier's own proposals, unless `--speculation` selects its draft alone (`always` in every
step, `draft` where it pays). The synchronous system (`bench.systems.synchronous`) has no such proposals; its best K and
shape are searched for every delay. Then both take turns, load by load and delay by delay. Tokens a second are counted
from the first piece to the last, so they exclude the links' delay of the first piece. "Of no delay" and "ahead by" are
medians of the ratios within one round, with minimum and maximum in brackets.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from bench import markdown
from bench.arguments import limit, numbers, parser_of, whole_numbers
from bench.paired import ratios
from demo.prompts import held_out
from specdec.client import AsyncClient, GenerateOptions, Speculation
from specdec.local import PROGRAMS, Stack
from testing.delay_process import DelayProcess

KV_TOKENS = 32768
SEARCH_TOKENS = 64
PINGS = 40

RATES = (
    "round trip, target steps (ms)",
    "tokens/s",
    "of no delay",
    "synchronous, best of K",
    "of no delay",
    "ahead by",
)
STEPS = ("round trip", "tokens a step", "of undrafted steps", "first token, ms", "synchronous: a step", "first, ms")
"""Columns of the two tables."""


class Distance:
    def __init__(self, proxy: DelayProcess, echo: str, step: float) -> None:
        self._proxy = proxy
        self._echo = echo
        self._step = step

    def set(self, steps: float) -> None:
        """Set the round trip of a link, in target steps."""
        self._proxy.delay(steps * self._step / 2)

    async def measured(self) -> float:
        """Return the median seconds of a round trip, the proxy's own work included."""
        host, port = self._echo.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        seconds = []
        for _ in range(PINGS):
            begin = time.perf_counter()
            writer.write(b"x")
            await reader.readexactly(1)
            seconds.append(time.perf_counter() - begin)
        writer.close()
        return statistics.median(seconds)


@contextlib.asynccontextmanager
async def echoing() -> AsyncIterator[str]:
    """Yield the address of an echo server."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(64):
            writer.write(data)
        writer.close()

    async with await asyncio.start_server(echo, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        yield f"{host}:{port}"


@dataclass(frozen=True)
class Shape:
    """The shape of the synchronous draft's tree, proposed as a whole."""

    nodes: int
    branches: int

    @property
    def options(self) -> GenerateOptions:
        return {"speculation": "always", "max_depth": self.nodes, "max_branches": self.branches}

    def __str__(self) -> str:
        return f"{'chain' if self.branches == 1 else 'tree'} of {self.nodes}"


@dataclass(frozen=True)
class Run:
    """The result of one load under one delay."""

    tokens: list[list[int]]  # of each stream
    rate: float  # tokens a second of all streams, from the first piece on
    first: float  # seconds to the first piece, median
    steps: list[float]  # seconds of each target step, without those of prompts
    speculation: list[Speculation]

    @property
    def tokens_a_step(self) -> float:
        return sum(map(len, self.tokens)) / sum(each.steps for each in self.speculation)

    @property
    def undrafted(self) -> float:
        """Fraction of tokens that come from steps without candidates."""
        return sum(each.sources.get("plain", 0) for each in self.speculation) / sum(map(len, self.tokens))


class System:
    """A system under test: a running stack and the options of its requests."""

    def __init__(self, name: str, client: AsyncClient, options: GenerateOptions) -> None:
        self.name = name
        self._client = client
        self._options = options

    async def run(self, prompts: Sequence[list[int]], tokens: int, shape: Shape | None = None) -> Run:
        """Run all prompts concurrently; `shape` is for the synchronous system."""
        salt = uuid.uuid4().hex  # the same prompts are sent at each delay
        common: GenerateOptions = {**self._options, "max_tokens": tokens, "ignore_end_token": True, "cache_salt": salt}
        if shape is not None:
            common |= shape.options
        begin = time.perf_counter()
        said: list[list[int]] = [[] for _ in prompts]
        arrivals: list[list[tuple[float, int]]] = [[] for _ in prompts]  # (time, tokens) of each piece
        steps: list[list[float]] = [[] for _ in prompts]
        speculation: list[Speculation] = []

        async def one(stream: int) -> None:
            options: GenerateOptions = {**common, "tokens": prompts[stream], "seed": stream}
            async with self._client.generate(**options) as chunks:
                async for chunk in chunks:
                    said[stream] += chunk.tokens
                    arrivals[stream].append((time.perf_counter(), len(chunk.tokens)))
                    steps[stream].append(chunk.step_seconds)
                    if chunk.finish is not None:
                        speculation.append(chunk.finish.speculation)

        await asyncio.gather(*map(one, range(len(prompts))))
        seconds = max(pieces[-1][0] for pieces in arrivals) - min(pieces[0][0] for pieces in arrivals)
        counted = sum(count for pieces in arrivals for _, count in pieces[1:])
        first = statistics.median(pieces[0][0] - begin for pieces in arrivals)
        return Run(said, counted / seconds, first, [seconds for own in steps for seconds in own[1:]], speculation)


async def measure(args: argparse.Namespace, proxy: DelayProcess, addresses: dict[str, str]) -> None:
    options: GenerateOptions = {"temperature": args.temperature, "speculation": args.speculation}
    async with contextlib.AsyncExitStack() as exits:
        systems = {
            name: System(name, await exits.enter_async_context(AsyncClient(address)), options)
            for name, address in addresses.items()
        }
        ordinary, synchronous = systems["ordinary"], systems["synchronous"]
        prompts = iter(held_out((args.rounds + args.search_texts + 2) * args.streams, args.prompt_tokens))

        def load() -> list[list[int]]:
            return [next(prompts) for _ in range(args.streams)]

        # 1. Warm up, and measure the target step.
        for number in range(2):
            warm = load()
            found = await ordinary.run(warm, args.tokens)
            await synchronous.run(warm, args.tokens, Shape(8, 1))
            print(f"target step {1e3 * statistics.median(found.steps):.2f} ms" if number else "warm", flush=True)
        echo = await asyncio.to_thread(proxy.to, await exits.enter_async_context(echoing()))
        distance = Distance(proxy, echo, statistics.median(found.steps))

        # 2. Find the synchronous system's best shape for every delay.
        shapes = [Shape(nodes, branches) for branches in args.branches for nodes in args.nodes]
        texts = [load() for _ in range(args.search_texts)]
        best: dict[float, Shape] = {}
        trips: dict[float, float] = {}
        for steps in args.round_trips:
            distance.set(steps)
            trips[steps] = await distance.measured()
            rates: dict[Shape, list[float]] = defaultdict(list)
            for text in texts:
                for shape in shapes:
                    rates[shape].append((await synchronous.run(text, SEARCH_TOKENS, shape)).rate)
            best[steps] = max(shapes, key=lambda shape: statistics.mean(rates[shape]))
            line = ", ".join(f"{shape} {statistics.mean(rates[shape]):.0f}" for shape in shapes)
            print(f"  round trip {steps:g} steps, {1e3 * trips[steps]:.2f} ms: {line}", flush=True)

        # 3. Rounds.
        runs: dict[tuple[str, float], list[Run]] = defaultdict(list)
        for number in range(args.rounds):
            asked = load()
            for steps in args.round_trips[:: -1 if number % 2 else 1]:
                distance.set(steps)
                for system in list(systems.values())[:: -1 if number % 2 else 1]:
                    its_shape = best[steps] if system is synchronous else None
                    runs[system.name, steps].append(await system.run(asked, args.tokens, its_shape))
        report(args, runs, best, trips)


def report(
    args: argparse.Namespace,
    runs: dict[tuple[str, float], list[Run]],
    best: dict[float, Shape],
    trips: dict[float, float],
) -> None:
    def rates(name: str, steps: float) -> list[float]:
        return [run.rate for run in runs[name, steps]]

    def ratio(above: list[float], below: list[float]) -> str:
        found = ratios(above, below)
        return f"{found.median:.2f} ({found.least:.2f} to {found.most:.2f})"

    print(f"{args.dtype}, T = {args.temperature:g}, {args.streams} streams, {args.rounds} rounds, {args.tokens} tokens")
    if args.target_step_ms or args.draft_step_ms:
        print(f"simulated: steps of at least {args.target_step_ms:g} ms (target), {args.draft_step_ms:g} ms (draft)")
    print()
    print(markdown.head(RATES))
    for steps in args.round_trips:
        ours, theirs = rates("ordinary", steps), rates("synchronous", steps)
        cells = [
            f"{steps:g} ({1e3 * trips[steps]:.2f})",
            f"{statistics.median(ours):.0f}",
            ratio(ours, rates("ordinary", 0.0)),
            f"{statistics.median(theirs):.0f}, {best[steps]}",
            ratio(theirs, rates("synchronous", 0.0)),
            ratio(ours, theirs),
        ]
        print(markdown.row(cells))
    print("\n" + markdown.head(STEPS))
    for steps in args.round_trips:
        ordinary, synchronous = runs["ordinary", steps], runs["synchronous", steps]
        cells = [
            f"{steps:g}",
            f"{statistics.mean(run.tokens_a_step for run in ordinary):.2f}",
            f"{100 * statistics.mean(run.undrafted for run in ordinary):.1f} %",
            f"{1e3 * statistics.median(run.first for run in ordinary):.1f}",
            f"{statistics.mean(run.tokens_a_step for run in synchronous):.2f}",
            f"{1e3 * statistics.median(run.first for run in synchronous):.1f}",
        ]
        print(markdown.row(cells))
    said = [[run.tokens for run in each] for each in runs.values()]
    equal = all(each == said[0] for each in said)
    print(f"\ntokens of both systems under all delays: {'equal' if equal else 'NOT EQUAL'}")


def main(given: Sequence[str]) -> None:
    args = parsed(given)
    memory = ("--kv-tokens", str(KV_TOKENS))
    with contextlib.ExitStack() as exits:
        proxy = exits.enter_context(DelayProcess.start())

        def start(*variant: str, verifier_options: tuple[str, ...] = ()) -> str:
            programs = {role: ("bench.systems.pod", role, *variant) for role in ("verifier", "draft")}
            stack = Stack.start(
                dtype=args.dtype,
                programs=PROGRAMS | programs,
                route=proxy.to,
                verifier_options=(*memory, "--step-ms", str(args.target_step_ms), *verifier_options),
                draft_options=(*memory, "--step-ms", str(args.draft_step_ms)),
            )
            return exits.enter_context(stack).address

        most = ("--max-candidates", str(max(args.nodes)))
        addresses = {"ordinary": start(), "synchronous": start("--synchronous", verifier_options=most)}
        asyncio.run(measure(args, proxy, addresses))


def parsed(given: Sequence[str]) -> argparse.Namespace:
    parser = parser_of("delay", __doc__)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--speculation", choices=["auto", "draft", "always"], default="auto")
    parser.add_argument("--rounds", type=int, default=6, help="rounds, each with new prompts for all streams")
    parser.add_argument("--prompt-tokens", type=int, default=96)
    parser.add_argument("--tokens", type=int, default=128, help="tokens per stream")
    parser.add_argument(
        "--round-trips", type=numbers, default=[0.0, 0.1, 0.3, 0.5, 1.0], help="in target steps; 0 is always measured"
    )
    parser.add_argument("--target-step-ms", type=float, default=0.0, help="minimum target step, by sleeping")
    parser.add_argument("--draft-step-ms", type=float, default=0.0, help="minimum draft step, by sleeping")
    parser.add_argument("--nodes", type=whole_numbers, default=[4, 8, 16, 24, 32], help="values of K to try")
    parser.add_argument("--branches", type=whole_numbers, default=[1, 3], help="branches to try; 1: a chain")
    parser.add_argument("--search-texts", type=int, default=2)
    args = parser.parse_args(given)
    limit(parser, args, 1, "streams", "rounds", "prompt_tokens", "tokens", "nodes", "branches", "search_texts")
    limit(parser, args, 0, "temperature", "round_trips", "target_step_ms", "draft_step_ms")
    if 0.0 not in args.round_trips:  # the rates are divided by those of no delay
        args.round_trips.insert(0, 0.0)
    return args
