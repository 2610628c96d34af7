"""The endpoint of a client: where it connects, with which credentials, and how patiently. Knows nothing about how calls
are made."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import EllipsisType
from typing import Generic, TypeVar

import grpc

from specdec.client.address import parse_addresses
from specdec.client.request_id import REQUEST_ID, is_request_id, new_request_id
from specdec.client.retries import Retries
from specdec.client.rotation import Rotation

ROUND_ROBIN = (
    "grpc.service_config",
    '{"loadBalancingConfig": [{"round_robin": {}}], "connectionScaling": {"maxConnectionsPerSubchannel": 10}}',
)
"""Option of a channel to a name that may stand for several servers: a retry must reach another one, and gRPC's default,
pick_first, would return to the same. A server takes 100 calls on a connection, and gRPC then opens another; ten is the
most that it opens."""

_OPTIONS: dict[str, int | str] = {
    ROUND_ROBIN[0]: ROUND_ROBIN[1],
    # gRPC fails calls at once while it puts off reconnecting, by default longer than the retries last.
    "grpc.initial_reconnect_backoff_ms": 100,
    "grpc.max_reconnect_backoff_ms": 1_000,
    # After a failure names are resolved again: pods come back under other addresses. By default twice a minute at most.
    "grpc.dns_min_time_between_resolutions_ms": 2_000,
    # A server that is frozen, or gone without a word, is pinged after so long a silence, and given up if it does not
    # answer for so long. A ping that gRPC sends to measure the network takes the place of this one.
    "grpc.keepalive_time_ms": 20_000,
    "grpc.keepalive_timeout_ms": 10_000,
    "grpc.http2.ping_timeout_ms": 10_000,
    "grpc.http2.max_pings_without_data": 0,
    # A long completion with log-probabilities passes gRPC's 4 MiB.
    "grpc.max_receive_message_length": 64 * 1024 * 1024,
}


_LONGEST_TIMEOUT = 1e7  # seconds

Metadata = tuple[tuple[str, str | bytes], ...]

Channel = TypeVar("Channel", grpc.Channel, grpc.aio.Channel)


class Endpoint(Generic[Channel]):
    """The base of both clients: settings, and a connection to each server that was asked."""

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        timeout: float | None = None,
        max_retries: int = 5,
        credentials: grpc.ChannelCredentials | None = None,
        api_key: str | None = None,
        metadata: Sequence[tuple[str, str | bytes]] = (),
        options: Sequence[tuple[str, int | str]] = (),
    ) -> None:
        """Take the settings of all calls; nothing connects before the first one.

        `address` is "host:port", or several of them, joined by commas or as a sequence; each may be spelled as gRPC
        does ("dns:///host:port", "ipv4:1.2.3.4:50050", "unix:/path"), and a name stands for every server it resolves
        to. ValueError if one is no address. Calls take turns at them, and a stream that breaks off goes on at another.
        `timeout` is in seconds and bounds a call with all its retries; None is no bound. `max_retries` is how often in
        a row, without a new token, an address is tried again while it is unavailable; once it has answered, for ten
        seconds at least, unless `max_retries` is 0. Without `credentials` the
        connection is not encrypted. `api_key` goes to servers that want one, and `metadata` to all, with every call.
        `options` are gRPC channel arguments.
        """
        self._rotation = Rotation(_targets(address))
        self._timeout = _checked(timeout)
        self._max_retries = max_retries
        self._credentials = credentials
        self._metadata: Metadata = (*metadata, *_authorization(api_key))
        self._options = list((_OPTIONS | dict(options)).items())
        self._channels: dict[str, Channel] = {}  # by address
        self._closed = 0  # times
        # Of a synchronous client, which threads may share: set when it is closed.
        self._connecting, self._over = threading.Lock(), threading.Event()

    def _with(self, metadata: Sequence[tuple[str, str | bytes]]) -> Metadata:
        """Return the metadata of a call: that of all calls, and what goes with this one alone or in its place."""
        replaced = {key for key, _ in metadata}
        return tuple([each for each in self._metadata if each[0] not in replaced] + list(metadata))

    def _identified(
        self, request_id: str | None, metadata: Sequence[tuple[str, str | bytes]] = ()
    ) -> tuple[str, Metadata]:
        """Return the id of a request, and the metadata of its calls: the id that is given, or the one that goes with
        every call, or a new one. ValueError if services would not take it."""
        all_metadata = self._with(metadata)
        usual = next((value for key, value in all_metadata if key == REQUEST_ID), None)
        found = request_id if request_id is not None else usual if isinstance(usual, str) else new_request_id()
        if not is_request_id(found):
            raise ValueError(f"request_id = {found!r}: must be 1 to 64 printable ASCII characters")
        others: Metadata = tuple(each for each in all_metadata if each[0] != REQUEST_ID)
        return found, ((REQUEST_ID, found), *others)

    def _retries(self, timeout: float | EllipsisType | None) -> Retries:
        timeout = self._timeout if timeout is ... else _checked(timeout)
        closed = self._closed
        return Retries(self._rotation, self._max_retries, timeout, lambda: self._closed > closed)


def _targets(given: str | Sequence[str]) -> list[str]:
    try:
        return [address.target for address in parse_addresses(given)]
    except ValueError as error:
        raise ValueError(f"address = {error}") from None


def _authorization(api_key: str | None) -> tuple[tuple[str, str], ...]:
    if api_key is None:
        return ()
    if not api_key or not api_key.isascii() or not api_key.isprintable():
        raise ValueError("api_key: must be a line of printable ASCII")  # it is not repeated
    return (("authorization", f"Bearer {api_key}"),)


def _checked(timeout: float | None) -> float | None:
    if timeout is not None and not timeout <= _LONGEST_TIMEOUT:
        raise ValueError(f"timeout = {timeout!r}: must be at most {_LONGEST_TIMEOUT:g} seconds, or None for no bound")
    return timeout
