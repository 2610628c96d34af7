"""Measure what the orchestrator's relay adds to a round, on loopback.

    python -m bench.relay

A verifier and a draft that compute nothing play one session through a real orchestrator process: a
commit goes out, the draft answers it with candidates at once, the verifier answers those with the next
commit. The same round over one direct stream is measured in the same run; the difference is the relay.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from typing import Any

import grpc

from bench.echo import Echo, before
from specdec.serving.server import registered
from specdec.v2 import draft_pb2, draft_pb2_grpc, generation_pb2, generation_pb2_grpc, model_pb2
from testing.processes import started


async def _direct(address: str, rounds: int) -> list[float]:
    """Return seconds of each round over one stream, without an orchestrator, with the same messages."""
    seconds = []
    async with grpc.aio.insecure_channel(address) as channel:
        call: Any = draft_pb2_grpc.DraftServiceStub(channel).Draft()  # type: ignore[call-arg]
        await call.write(draft_pb2.DraftRequest(open=draft_pb2.DraftOpen()))
        await call.read()
        for base in range(rounds):
            start = time.perf_counter()
            committed = model_pb2.Committed(base=base, tokens=[5, 5])
            await call.write(draft_pb2.DraftRequest(committed=committed))
            await call.read()
            seconds.append(time.perf_counter() - start)
        call.cancel()
    return seconds


async def measure(rounds: int) -> tuple[list[float], list[float]]:
    """Return seconds of each round: (direct, relayed)."""
    server = grpc.aio.server()
    echo = Echo()
    registered(echo, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        async with (
            started(*before(address)) as (_, place),
            grpc.aio.insecure_channel(place) as channel,
        ):
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            prompt, tokens = generation_pb2.TokenPrompt(ids=[5]), 2 * (rounds + 1)
            request = generation_pb2.GenerateRequest(tokens=prompt, max_tokens=tokens)
            call: Any = stub.Generate(request)
            direct = await _direct(address, rounds)
            async for _ in call:
                pass
    finally:
        await server.stop(None)
    return direct, echo.verifier.seconds[5:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=400)
    args = parser.parse_args()
    direct, relayed = asyncio.run(measure(args.rounds))
    a, b = (1e3 * statistics.median(values) for values in (direct, relayed))
    print(f"direct round  {a:.3f} ms median")
    print(f"relayed round {b:.3f} ms median")
    print(f"the relay adds {b - a:.3f} ms a round")


if __name__ == "__main__":
    main()
