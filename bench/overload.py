"""Ten times the requests that fit: who is served, who is refused, how soon.

    python -m bench.overload

The verifier has memory for a few texts and a short queue. All requests of a burst come at once, over an open
connection; those admitted must complete, the others must be refused at once with a delay after which to come again, and
health must stay SERVING.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import Any

import grpc
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.prompts import held_out
from specdec.client.errors import from_rpc
from specdec.local import DEMO, Stack
from specdec.v1 import generation_pb2, generation_pb2_grpc

TOKENS = 256
MEMORY = 4096
WAITING = 8


async def ask(stub: Any, prompt: list[int]) -> tuple[float, object]:
    """(seconds, tokens generated or the error)."""
    request = generation_pb2.GenerateRequest(
        tokens=generation_pb2.TokenPrompt(ids=prompt), max_tokens=TOKENS, ignore_end_token=True
    )
    begin = time.perf_counter()
    try:
        answer = await stub.Complete(generation_pb2.CompleteRequest(request=request))
    except grpc.aio.AioRpcError as error:
        return time.perf_counter() - begin, error
    return time.perf_counter() - begin, len(answer.completions[0].tokens)


async def health(stack: Stack) -> list[str]:
    found = []
    for address in (stack.address, stack.addresses["verifier"]):
        async with grpc.aio.insecure_channel(address) as channel:
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            found.append(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
    return found


async def measure(stack: Stack, requests: int, bursts: int) -> None:
    print(f"{requests} requests at once, of {64 + TOKENS} tokens; memory for {MEMORY}, {WAITING} may wait")
    prompts = held_out(requests, tokens=64)
    async with grpc.aio.insecure_channel(stack.address) as channel:
        stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
        await asyncio.gather(*(ask(stub, prompt) for prompt in prompts[:WAITING]))  # connected and warm
        for _ in range(bursts):
            asking = [asyncio.create_task(ask(stub, prompt)) for prompt in prompts]
            await asyncio.sleep(0.3)
            during = await health(stack)
            report(await asyncio.gather(*asking))
            print(f"  health meanwhile: {during}")


def report(answers: list[tuple[float, object]]) -> None:
    served = [(seconds, result) for seconds, result in answers if isinstance(result, int)]
    refused = [(seconds, error) for seconds, error in answers if isinstance(error, grpc.aio.AioRpcError)]
    complete = sum(tokens == TOKENS for _, tokens in served)
    print(f"served {len(served)}, of which complete {complete}; the last after {max(s for s, _ in served):.1f} s")
    codes = {error.code().name for _, error in refused}
    delays = [from_rpc(error).retry_after for _, error in refused]
    times = [1e3 * seconds for seconds, _ in refused]
    print(f"  refused {len(refused)} with {codes}, all with a delay: {all(delays)}")
    print(f"  refusals took median {np.median(times):.0f} ms, worst {max(times):.0f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10 * MEMORY // (64 + TOKENS))
    parser.add_argument("--bursts", type=int, default=5)
    args = parser.parse_args()
    options = ("--kv-tokens", str(MEMORY), "--max-waiting", str(WAITING))
    with Stack.start(DEMO / "target", "none", dtype="bfloat16", verifier_options=options) as stack:
        asyncio.run(measure(stack, args.requests, args.bursts))


if __name__ == "__main__":
    main()
