from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from evaluation import virtual_time
from evaluation.channel import Channel, InProcessCall
from specdec.serving.errors import OverloadedError
from specdec.v2 import model_pb2

DELAY = 0.25


class Echo:
    async def Talk(self, requests: AsyncIterator[Any], context: Any) -> None:
        async for request in requests:
            if not request.tokens:
                raise OverloadedError("enough")
            await context.write(request)


def opened(channel: Channel) -> InProcessCall:
    return channel.stream_stream("/echo/Talk")(timeout=None, metadata=())


def message(*tokens: int) -> model_pb2.Committed:
    return model_pb2.Committed(base=1, tokens=tokens)


def test_messages_arrive_late_in_order_and_as_they_were_sent() -> None:
    async def main() -> None:
        now = asyncio.get_running_loop().time
        channel = Channel(Echo(), DELAY)
        call = opened(channel)
        sent = message(1)
        for token in range(1, 50):
            sent.tokens[:] = [token]
            await call.write(sent)
        start = now()
        answers = [list((await call.read()).tokens) for _ in range(1, 50)]
        assert answers == [[token] for token in range(1, 50)]
        assert now() - start == pytest.approx(2 * DELAY)
        assert channel.there.messages == channel.back.messages == 49
        assert channel.there.bytes == 49 * message(1).ByteSize()
        call.cancel()

    virtual_time.run(main())


def test_an_error_ends_the_stream_with_its_status() -> None:
    async def main() -> None:
        call = opened(Channel(Echo(), DELAY))
        await call.write(message(1))
        await call.write(message())
        await call.read()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        with pytest.raises(asyncio.InvalidStateError):
            await call.write(message(1))

    virtual_time.run(main())


def test_cancelling_ends_both_sides() -> None:
    ended: list[bool] = []

    class Patient:
        async def Talk(self, requests: AsyncIterator[Any], context: Any) -> None:
            try:
                async for _ in requests:
                    pass
            finally:
                ended.append(True)

    async def main() -> None:
        call = opened(Channel(Patient(), DELAY))
        await asyncio.sleep(1.0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call.read()
        assert not ended
        await asyncio.sleep(2 * DELAY)
        assert ended

    virtual_time.run(main())
