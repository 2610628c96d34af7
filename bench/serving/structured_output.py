"""Measure the effect of a JSON schema on tokens a second and tokens a step, with and without drafts.

    python -m bench structured-output [--rounds 5] [--streams 1 16]

The demo pair, with the draft in the verifier's process, continues prompts at temperature 0.8: freely or under random
schemas, drafted or plain, in turns. All ways of a round have the same prompts, schemas and seeds. With
`--vllm-python`, the interpreter of `make bench-peers`, vLLM answers the same requests with schemas, plain and with
n-gram speculation.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import time
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

from bench.arguments import limit, parser_of
from bench.paired import in_turns, ratios, warmed_up
from demo.prompts import held_out
from specdec.client import AsyncClient, Overloaded
from specdec.local import DEMO, Stack
from testing.schemas import random_schema

MAX_TOKENS = 64
REQUESTS = 48
"""Requests of a round, sequential or concurrent."""
FULL_SECONDS = 0.05
"""Pause before a refused request is sent again: it counts as measured time, so it is shorter than the server
suggests."""


class Figures(NamedTuple):
    """The speed of one way in one round."""

    tokens_a_second: float
    tokens_a_step: float


WAYS: dict[str, dict[str, Any]] = {
    "free, plain": {"speculation": "off", "ignore_end_token": True},
    "free, drafted": {"speculation": "auto", "ignore_end_token": True},
    "schema, plain": {"speculation": "off"},
    "schema, drafted": {"speculation": "auto"},
}


def requests(number: int) -> list[dict[str, Any]]:
    """Return the requests of a round: prompts as token ids, schemas and seeds."""
    chance = random.Random(number)
    return [
        {"tokens": prompt, "json_schema": random_schema(chance), "seed": chance.getrandbits(32)}
        for prompt in held_out(REQUESTS, tokens=16, seed=number)
    ]


async def figures(client: AsyncClient, way: str, asked: Sequence[dict[str, Any]], streams: int) -> Figures:
    """Send a round's requests one way, `streams` concurrently."""
    places = asyncio.Semaphore(streams)

    async def one(request: dict[str, Any]) -> tuple[int, int]:
        own = {name: value for name, value in request.items() if name != "json_schema" or way.startswith("schema")}
        async with places:
            while True:
                try:
                    result = await client.complete(
                        **own,
                        **WAYS[way],
                        max_tokens=MAX_TOKENS,
                        temperature=0.8,
                        tenant=way,  # no way reuses another's cached prompts or tried grammars
                    )
                    return len(result.completions[0].tokens), result.completions[0].finish.speculation.steps
                except Overloaded:  # at most 8 new grammars of a tenant may wait for their trial
                    await asyncio.sleep(FULL_SECONDS)

    begin = time.monotonic()
    found = await asyncio.gather(*map(one, asked))
    tokens, steps = (sum(each) for each in zip(*found, strict=True))
    return Figures(tokens / (time.monotonic() - begin), tokens / steps)


async def measure(address: str, streams: int, rounds: int) -> dict[str, list[Figures]]:
    """Return the figures of each way, one entry per round."""
    async with AsyncClient(address, timeout=600) as client:
        return await in_turns(list(WAYS), rounds, lambda way, number: figures(client, way, requests(number), streams))


def told(streams: int, found: dict[str, list[Figures]]) -> str:
    """Return a table of medians, and ratios to plain decoding of the same kind, with their spread."""
    lines = [f"{streams} streams"]
    for way, rounds in found.items():
        plain = found[f"{way.partition(',')[0]}, plain"]
        ratio = ratios((each.tokens_a_second for each in rounds), (each.tokens_a_second for each in plain))
        speed, depth = (median(values) for values in zip(*rounds, strict=True))
        lines.append(
            f"  {way:16} {speed:7.1f} tokens/s, {depth:.2f} a step, {ratio.median:.2f} of plain "
            f"({ratio.least:.2f} to {ratio.most:.2f})"
        )
    return "\n".join(lines)


def vllm_told(python: str, streams: int, rounds: int) -> str:
    """Return the output of vLLM's program for the same requests."""
    options = ["--model", str(DEMO / "target"), "--streams", str(streams), "--tokens", str(MAX_TOKENS)]
    given = json.dumps([requests(number) for number in warmed_up(rounds)])
    command = [python, "-m", "bench.systems.vllm_structured", *options]
    said = subprocess.run(command, input=given, text=True, stdout=subprocess.PIPE, check=True).stdout
    return "\n".join(line for line in said.splitlines() if "WARNING" not in line)  # vLLM logs to stdout


def main(given: Sequence[str]) -> None:
    parser = parser_of("structured-output", __doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--vllm-python", help="interpreter of an environment with vLLM (`make bench-peers`)")
    args = parser.parse_args(given)
    limit(parser, args, 1, "streams", "rounds")
    with Stack.start(DEMO / "target", "none", local_draft=DEMO / "draft", dtype="float32") as stack:
        for streams in args.streams:
            print(told(streams, asyncio.run(measure(stack.address, streams, args.rounds))), flush=True)
    for streams in args.streams if args.vllm_python else ():
        print(vllm_told(args.vllm_python, streams, args.rounds), flush=True)
