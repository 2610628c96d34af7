"""Long prompts are tokenized one at a time, and do not delay short ones."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import grpc
import pytest

from orchestrator.models.catalog import Catalog
from orchestrator.pods.peers import Peers
from orchestrator.pods.pods import Pods
from orchestrator.requests.model import ServedModel
from orchestrator.servicer import LONG_BYTES, MAX_WAITING_LONG, GenerationServicer
from specdec.text.tokenizer import Tokenizer, TooManyTokensError
from specdec.v2 import generation_pb2, generation_pb2_grpc
from tests.stack import served, until


class Blocked(Tokenizer):
    """A tokenizer that blocks on long texts until released, and finds every text too long."""

    longest_token = 1 << 20

    def __init__(self) -> None:
        self.may_go = threading.Event()
        self.begun = 0

    def encode(self, text: str, **_: Any) -> list[int]:
        if len(text) > LONG_BYTES:
            self.begun += 1
            assert self.may_go.wait(60)
        raise TooManyTokensError(f"{len(text)} tokens")


async def test_long_prompts_wait_for_each_other_and_only_so_many() -> None:
    tokenizer = Blocked()
    model = ServedModel("m", tokenizer, "", 256, 320, frozenset())
    servicer = GenerationServicer(Catalog.of(model, Peers(Pods())))
    async with (
        served(servicer) as (address, _),
        grpc.aio.insecure_channel(address) as channel,
    ):
        stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)

        async def ask(length: int) -> grpc.StatusCode:
            request = generation_pb2.GenerateRequest(text="x" * length)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Complete(generation_pb2.CompleteRequest(request=request))
            return refused.value.code()

        long = [asyncio.create_task(ask(2 * LONG_BYTES)) for _ in range(MAX_WAITING_LONG + 1)]
        await until(lambda: servicer._long.waiting == MAX_WAITING_LONG)
        assert await ask(2 * LONG_BYTES) is grpc.StatusCode.RESOURCE_EXHAUSTED
        long.pop().cancel()  # a cancelled call frees its place
        await until(lambda: servicer._long.waiting == MAX_WAITING_LONG - 1)
        assert await ask(10) is grpc.StatusCode.INVALID_ARGUMENT
        assert tokenizer.begun == 1
        tokenizer.may_go.set()
        assert set(await asyncio.gather(*long)) == {grpc.StatusCode.INVALID_ARGUMENT}
