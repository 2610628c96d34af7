"""Servers in the role of pods, each with one servicer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc


@asynccontextmanager
async def addresses(add: Callable[[Any, grpc.aio.Server], object], *servicers: object) -> AsyncIterator[list[str]]:
    """Serve each servicer, registered by `add`; yield their addresses."""
    async with AsyncExitStack() as exits:
        found = []
        for servicer in servicers:
            server = grpc.aio.server()
            add(servicer, server)
            found.append(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
            await server.start()
            exits.push_async_callback(server.stop, None)
        yield found
