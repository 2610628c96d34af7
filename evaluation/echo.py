"""A service that echoes messages, to measure the latency of a message between services.

python -m evaluation.echo
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from types import MappingProxyType
from typing import Any

import grpc
from prometheus_client.metrics_core import Metric

from specdec.serving.process.server import ServerSettings, run
from specdec.serving.timeline import Timelines
from specdec.serving.validation import MAX_MESSAGE_BYTES

PATH = "/specdec.Echo/Echo"


class Measured:
    """A service to be measured: always working, without metrics or state."""

    max_request_bytes = MAX_MESSAGE_BYTES
    connection_seconds = None
    gates = ()
    works = True
    needs: Mapping[str, bool] = MappingProxyType({})
    timelines = Timelines()

    def metrics(self) -> list[Metric]:
        return []

    async def close(self) -> None:
        """Nothing to close."""


class Echo(Measured):
    """The echo service. Its one method is a stream of bytes both ways."""

    name = "specdec.Echo"

    def register(self, server: Any) -> None:
        methods = {"Echo": grpc.stream_stream_rpc_method_handler(_echo, bytes, bytes)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(self.name, methods),))
        server.add_registered_method_handlers(self.name, methods)


async def _echo(requests: AsyncIterator[bytes], context: Any) -> None:
    async for request in requests:
        await context.write(request)


async def _load() -> Echo:
    return Echo()


if __name__ == "__main__":
    run(ServerSettings(log_level="error", drain_seconds=0, stop_with_stdin=True), _load, "evaluate")
