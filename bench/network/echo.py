"""A verifier and a draft that compute nothing, to measure the links and the orchestrator between them.

    python -m bench.network.echo

A session is ping-pong: the draft answers each commit with candidates immediately, and the verifier answers these with
the next commit.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import cache
from typing import Any

import grpc

from evaluation.echo import Measured
from specdec.engine.model_directory import ModelDirectory
from specdec.local import DEMO
from specdec.serving import checksum
from specdec.serving.identity import PROTOCOL_VERSION
from specdec.serving.messages import logprobs_message
from specdec.serving.process.server import ServerSettings, run
from specdec.v2 import draft_pb2, draft_pb2_grpc, model_pb2, verifier_pb2, verifier_pb2_grpc


@cache
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

    async def GetStats(
        self, request: draft_pb2.DraftServiceGetStatsRequest, context: Any
    ) -> draft_pb2.DraftServiceGetStatsResponse:
        return draft_pb2.DraftServiceGetStatsResponse()

    async def Draft(self, request_iterator: AsyncIterator[draft_pb2.DraftRequest], context: Any) -> None:  # type: ignore[override]
        async for request in request_iterator:
            if request.WhichOneof("message") == "open":
                opened = draft_pb2.DraftOpened(identity=_identity())
                await context.write(draft_pb2.DraftResponse(opened=opened))
            elif request.committed.tokens:
                base = request.committed.base + len(request.committed.tokens)
                extend = model_pb2.Extend(
                    base=base, tokens=[5] * 4, parents=[0, 1, 2, 3], logprob_bytes=logprobs_message([-0.1] * 4)
                )
                await context.write(draft_pb2.DraftResponse(extend=extend))


class EchoVerifier(verifier_pb2_grpc.VerifierServiceServicer):
    """Answers candidates with a commit of two tokens until the text is full."""

    async def Verify(self, request_iterator: AsyncIterator[verifier_pb2.VerifyRequest], context: Any) -> None:  # type: ignore[override]
        base, end, said = 0, 0, 0
        async for request in request_iterator:
            match request.WhichOneof("message"):
                case "open":
                    base, said = len(request.open.prompt_tokens), checksum.of_opening(request.open)
                    end = base + request.open.max_tokens
                    opened = verifier_pb2.VerifyOpened(identity=_identity(), max_nodes=64, drafting_wanted=True)
                    await context.write(verifier_pb2.VerifyResponse(opened=opened))
                    await asyncio.sleep(0.2)  # until the draft is open too: not part of a round
                case "extend":
                    pass
                case _:
                    continue
            finish = model_pb2.FINISH_REASON_LENGTH if base + 2 == end else model_pb2.FINISH_REASON_UNSPECIFIED
            said = checksum.extended(said, [5, 5], finish)
            commit = verifier_pb2.Commit(
                committed=model_pb2.Committed(base=base, tokens=[5, 5]),
                sources=[model_pb2.TOKEN_SOURCE_REMOTE_DRAFT, model_pb2.TOKEN_SOURCE_BONUS],
                finish_reason=finish,
                checksum=said,
                offered=4,
                accepted=1,
                steps=1,
                drafting_wanted=True,
            )
            base += 2
            await context.write(verifier_pb2.VerifyResponse(commit=commit))

    async def FindPrefix(
        self, request: verifier_pb2.FindPrefixRequest, context: Any
    ) -> verifier_pb2.FindPrefixResponse:
        return verifier_pb2.FindPrefixResponse()

    async def GetStats(self, request: verifier_pb2.GetStatsRequest, context: Any) -> verifier_pb2.GetStatsResponse:
        return verifier_pb2.GetStatsResponse(identity=_identity())


class Echo(Measured):
    """The verifier and the draft behind one address."""

    name = "specdec.v2.VerifierService"

    def register(self, server: grpc.aio.Server) -> None:
        draft_pb2_grpc.add_DraftServiceServicer_to_server(EchoDraft(), server)
        verifier_pb2_grpc.add_VerifierServiceServicer_to_server(EchoVerifier(), server)


def before(address: str, *options: str) -> tuple[str, ...]:
    """Return the `python -m` arguments of an orchestrator in front of the verifier and the draft at this address."""
    peers = ("--verifier", address, "--draft", address)
    return ("orchestrator", "--model", str(DEMO / "target"), *peers, "--port", "0", "--log-level", "error", *options)


async def _load() -> Echo:
    _identity()
    return Echo()


if __name__ == "__main__":
    run(ServerSettings(log_level="error", drain_seconds=0, stop_with_stdin=True), _load, "orchestrator")
