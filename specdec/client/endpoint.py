"""Where a client connects, as whom, and how patiently. Knows nothing about how calls are made."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import EllipsisType

import grpc

from specdec.client.retries import Retries

_OPTIONS: dict[str, int | str] = {
    # A retry must reach another server where there is one; pick_first would return to the same.
    "grpc.service_config": '{"loadBalancingConfig": [{"round_robin": {}}]}',
    # gRPC fails calls at once while it puts off reconnecting, by default longer than the retries last.
    "grpc.initial_reconnect_backoff_ms": 100,
    "grpc.max_reconnect_backoff_ms": 2_000,
    # A long completion with log-probabilities passes gRPC's 4 MiB.
    "grpc.max_receive_message_length": 64 * 1024 * 1024,
}


class Endpoint:
    """The settings that both clients share."""

    def __init__(
        self,
        address: str,
        *,
        timeout: float | None = None,
        max_retries: int = 5,
        credentials: grpc.ChannelCredentials | None = None,
        metadata: Sequence[tuple[str, str | bytes]] = (),
        options: Sequence[tuple[str, int | str]] = (),
    ) -> None:
        """Settings of all calls; nothing connects before the first one.

        `address` is "host:port" or any target of gRPC's, such as "dns:///host:port" for every server
        that a name resolves to. `timeout` is in seconds and bounds a call with all its retries; None is
        no bound. `max_retries` is how often in a row, without a new token, a call is tried again while
        the server is unavailable. Without `credentials` the connection is not encrypted. `metadata` goes
        with every call, and `options` are gRPC channel arguments.
        """
        self._address = address
        self._timeout = timeout
        self._max_retries = max_retries
        self._credentials = credentials
        self._metadata = tuple(metadata)
        self._options = list((_OPTIONS | dict(options)).items())
        self._connecting = threading.Lock()  # threads may share a synchronous client

    def _retries(self, timeout: float | EllipsisType | None) -> Retries:
        return Retries(self._max_retries, self._timeout if timeout is ... else timeout)
