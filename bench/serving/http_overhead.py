"""Compare the cost of OpenAI's HTTP API and gRPC: processor time of all services per token, and time to first token.

    python -m bench http-overhead [--rounds 8]

The demo pair generates the same texts by gRPC and by HTTP, in turns. The clients' own processor time is not counted,
but on few cores it delays the services, so both clients are as light as possible.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from statistics import median
from typing import NamedTuple

from bench.arguments import limit, parser_of
from bench.paired import in_turns, ratios, spread
from bench.serving.answers import Answer
from bench.systems.processor_time import processor_seconds
from demo.prompts import held_out
from specdec.client import AsyncClient
from specdec.local import DEMO, Stack

TOKENS = 200
FEW = ("--kv-tokens", "16384", "--threads", "1")
SEED = 7


class Costs(NamedTuple):
    """Costs of concurrent requests."""

    milliseconds_a_token: float  # of processor time of all services
    first_milliseconds: float  # median time to the first token


Ask = Callable[[list[int]], Awaitable[Answer]]


async def by_grpc(client: AsyncClient, prompt: list[int]) -> Answer:
    answer = Answer()
    stream = client.generate(
        tokens=prompt,
        max_tokens=TOKENS,
        temperature=0.8,
        seed=SEED,
        ignore_end_token=True,
        speculation="always",
        tenant="grpc",  # the two ways share no cached prompts
    )
    return await answer.record(stream)


async def by_http(address: str, prompt: list[int]) -> Answer:
    host, _, port = address.partition(":")
    body = json.dumps(
        {
            "model": "target",
            "prompt": prompt,
            "max_tokens": TOKENS,
            "temperature": 0.8,
            "seed": SEED,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "specdec": {"speculation": "always", "tenant": "http"},
        }
    ).encode()
    answer, usage = Answer(), b""
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            answer.piece(0)
            usage = line
    writer.close()
    answer.tokens = json.loads(usage[6:])["usage"]["completion_tokens"]
    return answer


async def costs(ask: Ask, processes: set[int], prompts: Sequence[list[int]]) -> Costs:
    """Send all prompts concurrently; return the mean cost of a token and the median time to the first one."""
    before = processor_seconds(processes)
    answers = await asyncio.gather(*map(ask, prompts))
    spent = processor_seconds(processes) - before
    tokens = sum(each.tokens for each in answers)
    return Costs(1e3 * spent / tokens, 1e3 * median(each.first for each in answers))


async def measure(stack: Stack, streams: int, rounds: int) -> tuple[list[Costs], list[Costs]]:
    """Return the costs by gRPC and by HTTP, one entry per round."""
    processes = {child.process.pid for child in stack.children.values()}
    async with AsyncClient(stack.address, timeout=300) as client:
        by: list[Ask] = [partial(by_grpc, client), partial(by_http, stack.addresses["openai"])]
        found = await in_turns(by, rounds, lambda ask, n: costs(ask, processes, held_out(streams, tokens=64, seed=n)))
    return found[by[0]], found[by[1]]


def told(by_grpc: Sequence[Costs], by_http: Sequence[Costs]) -> str:
    """Return a summary of the rounds in one line."""
    grpc, http = (Costs(*map(median, zip(*costs, strict=True))) for costs in (by_grpc, by_http))
    ratio = ratios((each.milliseconds_a_token for each in by_http), (each.milliseconds_a_token for each in by_grpc))
    later = spread(b.first_milliseconds - a.first_milliseconds for a, b in zip(by_grpc, by_http, strict=True))
    return (
        f"{grpc.milliseconds_a_token:.2f} ms of processor time a token by gRPC, {http.milliseconds_a_token:.2f} by "
        "HTTP, ratio "
        f"{ratio.median:.3f}, from {ratio.least:.3f} to {ratio.most:.3f}; "
        f"first token {grpc.first_milliseconds:.1f} and {http.first_milliseconds:.1f} ms; "
        f"later by {later.median:.1f}, from {later.least:.1f} to {later.most:.1f}; {len(by_grpc)} pairs"
    )


def main(given: Sequence[str]) -> None:
    parser = parser_of("http-overhead", __doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args(given)
    limit(parser, args, 1, "streams", "rounds")
    options = {"dtype": "float32", "verifier_options": FEW, "draft_options": FEW, "openai_options": ()}
    with Stack.start(DEMO / "target", str(DEMO / "draft"), **options) as stack:  # type: ignore[arg-type]
        for streams in args.streams:
            print(f"{streams} streams: {told(*asyncio.run(measure(stack, streams, args.rounds)))}", flush=True)
