"""The other workers of an orchestrator: each records its own requests, and any of them may be asked about all.

The kernel gives a connection to any worker, not necessarily to the one with the request. So each worker answers the
others on a Unix socket, in a folder that only their user can enter.
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
    """Answers the other workers, and finds their sockets."""

    def __init__(self, socket: Path) -> None:
        """`socket` is this worker's own, next to those of the others."""
        self._socket = socket
        self._server = grpc.aio.server(interceptors=[CallInterceptor()])
        self._channels: dict[Path, grpc.aio.Channel] = {}

    async def start(self, recorded: TraceServicer) -> None:
        """Start serving this worker's timelines to the others. On failure, log a warning: the others will not find its
        requests."""
        recorded.register(self._server)
        try:
            self._server.add_insecure_port(_address(self._socket))
        except RuntimeError as error:
            log.warning("siblings_not_answered", socket=str(self._socket), why=str(error))
            return
        await self._server.start()

    def channels(self) -> list[grpc.aio.Channel]:
        """Return a channel to every other worker seen so far."""
        with contextlib.suppress(OSError):  # without the folder there are no others
            for socket in self._socket.parent.iterdir():
                if socket != self._socket and socket not in self._channels:
                    self._channels[socket] = grpc.aio.insecure_channel(_address(socket))
        return list(self._channels.values())

    async def close(self) -> None:
        await self._server.stop(None)
        for channel in self._channels.values():
            await channel.close()


def _address(socket: Path) -> str:
    return f"unix:{socket}"
