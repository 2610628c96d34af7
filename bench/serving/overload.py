"""Measure an overload of ten times the capacity: how many requests are served or refused, and how fast.

    python -m bench overload [--within 1]

The verifier has memory for a few texts and a short queue. The requests of a burst arrive concurrently, or spread evenly
over `--within` seconds, on an open connection. Admitted ones must complete, the others must be refused immediately with
a retry delay, and health must stay SERVING.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import grpc
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.arguments import limit, parser_of
from demo.prompts import held_out
from specdec.client.errors import from_rpc
from specdec.local import DEMO, Stack
from specdec.v2 import generation_pb2

COMPLETE = "/specdec.v2.GenerationService/Complete"
TOKENS = 256
MEMORY = 4096
WAITING = 8


async def query(call: Any, prompt: list[int], after: float = 0.0) -> tuple[float, object]:
    """Send one request; return (seconds, tokens generated or the error)."""
    await asyncio.sleep(after)
    request = generation_pb2.GenerateRequest(
        tokens=generation_pb2.TokenPrompt(ids=prompt), max_tokens=TOKENS, ignore_end_token=True
    )
    message = generation_pb2.CompleteRequest(request=request).SerializeToString()
    begin = time.perf_counter()
    try:
        answer = await call(message)
    except grpc.aio.AioRpcError as error:
        return time.perf_counter() - begin, error
    seconds = time.perf_counter() - begin
    return seconds, len(generation_pb2.CompleteResponse.FromString(answer).completions[0].tokens)


async def health(stack: Stack) -> list[str]:
    found = []
    for address in (stack.address, stack.addresses["verifier"]):
        async with grpc.aio.insecure_channel(address) as channel:
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            found.append(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
    return found


async def measure(stack: Stack, requests: int, bursts: int, within: float) -> None:
    when = f"within {within:g} s" if within else "at once"
    print(f"{requests} requests {when}, of {64 + TOKENS} tokens; memory for {MEMORY}, {WAITING} may wait")
    prompts = held_out(requests, tokens=64)
    async with grpc.aio.insecure_channel(stack.address) as channel:
        call: Any = channel.unary_unary(COMPLETE)  # bytes, to save parsing: the client shares the machine's cores
        await asyncio.gather(*(query(call, prompt) for prompt in prompts[:WAITING]))  # connected and warm
        for _ in range(bursts):
            asking = [
                asyncio.create_task(query(call, prompt, within * number / requests))
                for number, prompt in enumerate(prompts)
            ]
            await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)  # a refusal: the verifier is full now
            during = await health(stack)
            report(await asyncio.gather(*asking))
            print(f"  health meanwhile: {during}")


def report(answers: list[tuple[float, object]]) -> None:
    served = [(seconds, result) for seconds, result in answers if isinstance(result, int)]
    refused = [(seconds, error) for seconds, error in answers if isinstance(error, grpc.aio.AioRpcError)]
    complete = sum(tokens == TOKENS for _, tokens in served)
    last = f"; the last after {max(seconds for seconds, _ in served):.1f} s" if served else ""
    print(f"served {len(served)}, {complete} complete{last}")
    if not refused:
        print("  refused none")
        return
    codes = {error.code().name for _, error in refused}
    delays = [from_rpc(error).retry_after for _, error in refused]
    times = [1e3 * seconds for seconds, _ in refused]
    print(f"  refused {len(refused)} with {codes}, all with a delay: {all(delays)}")
    print(f"  refusals took median {np.median(times):.0f} ms, worst {max(times):.0f} ms")


def main(given: Sequence[str]) -> None:
    parser = parser_of("overload", __doc__)
    parser.add_argument("--requests", type=int, default=10 * MEMORY // (64 + TOKENS))
    parser.add_argument("--bursts", type=int, default=5)
    parser.add_argument("--within", type=float, default=0.0, help="seconds over which a burst is spread")
    args = parser.parse_args(given)
    limit(parser, args, 1, "requests", "bursts")
    limit(parser, args, 0, "within")
    # One core computes; the other is for the orchestrator and for all clients.
    options = ("--kv-tokens", str(MEMORY), "--max-waiting", str(WAITING), "--threads", "1")
    with Stack.start(DEMO / "target", "none", dtype="bfloat16", verifier_options=options) as stack:
        asyncio.run(measure(stack, args.requests, args.bursts, args.within))
