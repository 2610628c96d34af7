"""The other workers of an orchestrator: each has recorded its own requests, and any of them is asked for all.

The kernel gives a connection to one of the workers, which need not be the one that had the request. So each worker
answers the others at a Unix socket; the sockets lie in a folder that only their user can enter.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import grpc
import structlog

from specdec.serving.interceptor import CallInterceptor
from specdec.serving.tracing.servicer import TraceServicer

log = structlog.get_logger()


class Siblings:
    """Answers the other workers, and knows where they answer."""

    def __init__(self, socket: Path) -> None:
        """`socket` is this worker's own; those of the others lie beside it."""
        self._socket = socket
        self._server = grpc.aio.server(interceptors=[CallInterceptor()])
        self._channels: dict[Path, grpc.aio.Channel] = {}

    async def start(self, recorded: TraceServicer) -> None:
        """Tell the others what is recorded here, from now on. If that cannot be, this one's requests are not found by
        way of the others."""
        recorded.register(self._server)
        try:
            self._server.add_insecure_port(_address(self._socket))
        except RuntimeError as error:
            log.warning("siblings_not_answered", socket=str(self._socket), why=str(error))
            return
        await self._server.start()

    def channels(self) -> list[grpc.aio.Channel]:
        """Return a channel to each of the others that has ever been there."""
        with contextlib.suppress(OSError):  # without the folder nobody is there
            for each in self._socket.parent.iterdir():
                if each != self._socket and each not in self._channels:
                    self._channels[each] = grpc.aio.insecure_channel(_address(each))
        return list(self._channels.values())

    async def close(self) -> None:
        await self._server.stop(None)
        for channel in self._channels.values():
            await channel.close()


def _address(socket: Path) -> str:
    return f"unix:{socket}"
