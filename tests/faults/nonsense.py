"""Callers that send nonsense: messages of the right type with any content, in any order, and invalid bytes."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import grpc
from google.protobuf.message import Message

from tests.hostile.mutation import filled


async def call_with_nonsense(address: str, kind: type[Message], method: str, seed: int) -> Counter[str]:
    """Call repeatedly, some calls concurrently, until cancelled; return the number of calls by status."""
    generator = random.Random(seed)
    ends: Counter[str] = Counter()

    async def say() -> AsyncIterator[bytes]:
        opened = kind()
        opened.open.prompt_tokens.extend([5, 6, 7])  # type: ignore[attr-defined]
        opened.open.max_tokens = 50  # type: ignore[attr-defined]
        sane = generator.random() < 0.5  # sane at first
        for number in range(generator.randrange(1, 12)):
            if sane and number == 0:
                for penalty in ("repetition_penalty", "top_p"):
                    setattr(opened.open.sampling, penalty, 1.0)  # type: ignore[attr-defined]
                yield opened.SerializeToString()
            elif generator.random() < 0.2:
                yield generator.randbytes(generator.randrange(64))
            else:
                yield filled(kind(), generator).SerializeToString()
            await asyncio.sleep(0.01 * generator.random())

    async def call(stub: Any) -> None:
        while True:
            try:
                async for _ in stub(say(), timeout=2.0):
                    pass
                ends["OK"] += 1
            except grpc.aio.AioRpcError as error:
                ends[error.code().name] += 1

    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = channel.stream_stream(f"/specdec.v2.{method}")  # bytes, not serialized messages
        try:
            await asyncio.gather(*(call(stub) for _ in range(4)))
        except asyncio.CancelledError:
            return ends
    return ends
