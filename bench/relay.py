"""What the orchestrator's relay adds to a round, on loopback.

    python -m bench.relay

A verifier and a draft that compute nothing play one session through a real orchestrator process: a
commit goes out, the draft answers it with candidates at once, the verifier answers those with the next
commit. The same round over one direct stream is measured in the same run; the difference is the relay.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc

from specdec.engine.model_directory import ModelDirectory
from specdec.local import DEMO
from specdec.serving.wire import PROTOCOL_VERSION
from specdec.v1 import (
    draft_pb2,
    draft_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    model_pb2,
    verifier_pb2,
    verifier_pb2_grpc,
)


def _identity() -> model_pb2.ModelIdentity:
    directory = ModelDirectory(DEMO / "target")
    return model_pb2.ModelIdentity(
        protocol_version=PROTOCOL_VERSION,
        model="echo",
        tokenizer_fingerprint=directory.tokenizer_fingerprint,
        context_tokens=directory.context,
        vocabulary_size=directory.vocabulary,
    )


class EchoDraft(draft_pb2_grpc.DraftServiceServicer):
    """Answers each commit with four candidates."""

    async def Draft(self, request_iterator: AsyncIterator[draft_pb2.DraftRequest], context: Any) -> None:  # type: ignore[override]
        async for request in request_iterator:
            if request.WhichOneof("message") == "open":
                opened = draft_pb2.DraftOpened(identity=_identity())
                await context.write(draft_pb2.DraftResponse(opened=opened))
            elif request.committed.tokens:
                base = request.committed.base + len(request.committed.tokens)
                extend = model_pb2.Extend(base=base, tokens=[5] * 4, parents=[0, 1, 2, 3], scores=[-0.1] * 4)
                await context.write(draft_pb2.DraftResponse(extend=extend))


class EchoVerifier(verifier_pb2_grpc.VerifierServiceServicer):
    """Answers candidates with a commit, and notes how long they took since the last one."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.seconds: list[float] = []

    async def Verify(self, request_iterator: AsyncIterator[verifier_pb2.VerifyRequest], context: Any) -> None:  # type: ignore[override]
        base, sent = 0, 0.0
        async for request in request_iterator:
            match request.WhichOneof("message"):
                case "open":
                    base = len(request.open.prompt_tokens)
                    opened = verifier_pb2.VerifyOpened(identity=_identity(), max_nodes=64)
                    await context.write(verifier_pb2.VerifyResponse(opened=opened))
                    await asyncio.sleep(0.2)  # until the draft is open too: not a round
                case "extend":
                    self.seconds.append(time.perf_counter() - sent)
                case _:
                    continue
            last = len(self.seconds) >= self.rounds
            commit = verifier_pb2.Commit(
                committed=model_pb2.Committed(base=base, tokens=[5, 5]),
                sources=[model_pb2.TOKEN_SOURCE_DRAFT, model_pb2.TOKEN_SOURCE_BONUS],
                finish_reason=model_pb2.FINISH_REASON_LENGTH if last else model_pb2.FINISH_REASON_UNSPECIFIED,
            )
            base += 2
            sent = time.perf_counter()
            await context.write(verifier_pb2.VerifyResponse(commit=commit))

    async def GetLoad(self, request: verifier_pb2.GetLoadRequest, context: Any) -> verifier_pb2.GetLoadResponse:
        return verifier_pb2.GetLoadResponse()


async def _direct(address: str, rounds: int) -> list[float]:
    """The same messages over one stream, without an orchestrator."""
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
    """Seconds of each round: (direct, relayed)."""
    server = grpc.aio.server()
    verifier = EchoVerifier(rounds)
    draft_pb2_grpc.add_DraftServiceServicer_to_server(EchoDraft(), server)
    verifier_pb2_grpc.add_VerifierServiceServicer_to_server(verifier, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    command = (sys.executable, "-m", "orchestrator", "--model", str(DEMO / "target"), "--verifier", address)
    orchestrator = await asyncio.create_subprocess_exec(
        *command, "--draft", address, "--log-level", "error", stdout=asyncio.subprocess.PIPE
    )
    try:
        assert orchestrator.stdout is not None
        line = (await orchestrator.stdout.readline()).decode()
        async with grpc.aio.insecure_channel(line.split()[1]) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            request = generation_pb2.GenerateRequest(tokens=generation_pb2.TokenPrompt(ids=[5]), max_tokens=1000)
            call: Any = stub.Generate(request)
            direct = await _direct(address, rounds)
            async for _ in call:
                pass
    finally:
        orchestrator.terminate()
        await orchestrator.wait()
        await server.stop(None)
    return direct, verifier.seconds[5:]


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
