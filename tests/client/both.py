"""The synchronous client behind the asyncio client's interface, so that one test body drives both."""

from __future__ import annotations

import asyncio
from typing import Any, Self

from specdec.client import Chunk, Client, Model, Result, Stream, Tokenized


class ThreadedStream:
    """A Stream whose blocking calls run in a thread."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.request_id = stream.request_id

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        chunk = await asyncio.to_thread(next, self._stream, None)
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    def cancel(self) -> None:
        self._stream.cancel()

    async def __aenter__(self) -> Self:
        self._stream.__enter__()
        return self

    async def __aexit__(self, *exception: Any) -> None:
        self._stream.__exit__(*exception)


class ThreadedClient:
    """A Client whose blocking calls run in a thread."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        self._client = Client(*args, **settings)

    def generate(self, *args: Any, **options: Any) -> ThreadedStream:
        return ThreadedStream(self._client.generate(*args, **options))

    async def complete(self, *args: Any, **options: Any) -> Result:
        return await asyncio.to_thread(self._client.complete, *args, **options)

    async def models(self, **options: Any) -> list[Model]:
        return await asyncio.to_thread(self._client.models, **options)

    async def tokenize(self, *args: Any, **options: Any) -> Tokenized:
        return await asyncio.to_thread(self._client.tokenize, *args, **options)

    async def close(self) -> None:
        self._client.close()

    async def __aenter__(self) -> Self:
        self._client.__enter__()
        return self

    async def __aexit__(self, *exception: Any) -> None:
        self._client.__exit__(*exception)
