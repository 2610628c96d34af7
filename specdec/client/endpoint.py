"""The endpoint of a client: addresses, credentials, timeout and retries. It does not know how calls are made."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from types import EllipsisType
from typing import Generic, TypeVar
from weakref import WeakSet

import grpc

from specdec.client.retries import Retries, Rotation
from specdec.wire.address import parse_addresses
from specdec.wire.request_metadata import REQUEST_ID, is_request_id, new_request_id

ROUND_ROBIN = (
    "grpc.service_config",
    '{"loadBalancingConfig": [{"round_robin": {}}], "connectionScaling": {"maxConnectionsPerSubchannel": 10}}',
)
"""Channel option for names that may resolve to several servers. A retry must reach another server; gRPC's default,
pick_first, would pick the same one again. A server accepts 100 calls per connection; for more calls, gRPC opens further
connections, at most ten."""

_OPTIONS: dict[str, int | str] = {
    ROUND_ROBIN[0]: ROUND_ROBIN[1],
    # While gRPC backs off from reconnecting, calls fail immediately; the default back-off outlasts the retries.
    "grpc.initial_reconnect_backoff_ms": 100,
    "grpc.max_reconnect_backoff_ms": 1_000,
    # After a failure, resolve names again soon, since pods return under other addresses. gRPC's default is 30 s.
    "grpc.dns_min_time_between_resolutions_ms": 2_000,
    # After this silence the server is pinged. If it is frozen or gone, its calls fail when the timeout passes.
    # gRPC's own bandwidth probes may replace keepalive pings, so their timeout is set as well.
    "grpc.keepalive_time_ms": 20_000,
    "grpc.keepalive_timeout_ms": 10_000,
    "grpc.http2.ping_timeout_ms": 10_000,
    "grpc.http2.max_pings_without_data": 0,
    # Orchestrators are reached directly, also where `http_proxy` is set for the web.
    "grpc.enable_http_proxy": 0,
    # A long completion with log-probabilities exceeds gRPC's default of 4 MiB.
    "grpc.max_receive_message_length": 64 * 1024 * 1024,
}


_MAX_TIMEOUT = 1e7  # seconds

Metadata = tuple[tuple[str, str | bytes], ...]

Channel = TypeVar("Channel", grpc.Channel, grpc.aio.Channel)
Event = TypeVar("Event", threading.Event, asyncio.Event)


class Endpoint(Generic[Channel]):
    """The base of both clients: settings, and one channel per server in use."""

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
        """Store the settings of all calls; the first call connects.

        `address` is "host:port", or several of these, comma-separated or as a sequence. gRPC's forms are allowed
        ("dns:///host:port", "ipv4:1.2.3.4:50050", "unix:/path"); a name means every server it resolves to. ValueError
        for an invalid address. Calls rotate among the servers, and a broken stream resumes on another.

        `timeout` in seconds bounds a call including its retries; None: unbounded. `max_retries` bounds the consecutive
        retries of an unavailable address; new tokens reset the count. An address that has answered before is retried
        for at least ten seconds, and a text in progress waits for room at a full server for at least 90 s, unless
        `max_retries` is 0.

        Without `credentials` the connection is not encrypted. `api_key`, for servers with authentication, and
        `metadata` are sent with every call. `options` are gRPC channel arguments, and override the client's own. The
        client ignores `http_proxy` of the environment; `("grpc.enable_http_proxy", 1)` makes it use that proxy.
        """
        self._rotation = Rotation(_targets(address))
        self._timeout = _checked(timeout)
        self._max_retries = max_retries
        self._credentials = credentials
        self._metadata: Metadata = (*metadata, *_authorization(api_key))
        self._options = list((_OPTIONS | dict(options)).items())
        self._channels: dict[str, Channel] = {}  # by address
        self._closed = 0  # how many times
        self._pausing: WeakSet[threading.Event | asyncio.Event] = WeakSet()  # of open calls; `_end` sets them
        self._lock = threading.Lock()  # guards the three above: threads may share a synchronous client

    def _ended_by_closing(self, pause: Event) -> Event:
        """Return the event that ends the pauses of a call; closing the client sets it."""
        with self._lock:
            self._pausing.add(pause)
        return pause

    def _end(self) -> list[Channel]:
        """Mark the client as closed and end the pauses of its calls; return the channels to close."""
        with self._lock:
            self._closed += 1
            for pause in self._pausing:
                pause.set()
            channels, self._channels = self._channels, {}
        return list(channels.values())

    def _with(self, metadata: Sequence[tuple[str, str | bytes]]) -> Metadata:
        """Return the metadata of a call: the client's own, with `metadata` added or replacing the same keys."""
        replaced = {key for key, _ in metadata}
        return tuple([entry for entry in self._metadata if entry[0] not in replaced] + list(metadata))

    def _identified(
        self, request_id: str | None, metadata: Sequence[tuple[str, str | bytes]] = ()
    ) -> tuple[str, Metadata]:
        """Return the id of a request and the metadata of its calls. The id is the given one, else the one in the
        metadata, else a new one. ValueError if services would not accept it."""
        all_metadata = self._with(metadata)
        usual = next((value for key, value in all_metadata if key == REQUEST_ID), None)
        found = request_id if request_id is not None else usual if isinstance(usual, str) else new_request_id()
        if not is_request_id(found):
            raise ValueError(f"request_id = {found!r}: must be 1 to 64 printable ASCII characters")
        others: Metadata = tuple(entry for entry in all_metadata if entry[0] != REQUEST_ID)
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
        raise ValueError("api_key: must be a line of printable ASCII")  # a secret: not repeated in the message
    return (("authorization", f"Bearer {api_key}"),)


def _checked(timeout: float | None) -> float | None:
    if timeout is not None and not timeout <= _MAX_TIMEOUT:
        raise ValueError(f"timeout = {timeout!r}: must be at most {_MAX_TIMEOUT:g} seconds, or None for no limit")
    return timeout
