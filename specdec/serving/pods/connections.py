"""Channels to pods, with TLS or without."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import cast

import grpc

from specdec.serving.mux.channel import MuxChannel
from specdec.serving.process.server import CHANNEL_OPTIONS, PEER_OPTIONS
from specdec.serving.watched import Watched
from specdec.wire.tls_files import Contents, TlsFiles, channel_credentials

CHECK_SECONDS = 1.0
"""Minimum seconds between two checks of the TLS files for changes, on the event loop."""


def connect(address: str) -> grpc.aio.Channel:
    """Return a channel to a pod without TLS: all its sessions share one multiplexed connection."""
    channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS + PEER_OPTIONS)
    return cast("grpc.aio.Channel", MuxChannel(channel))


class SecureConnections:
    """Makes channels to pods with TLS; callable like `connect`.

    `files`: the authorities for pods' certificates, and our own certificate for pods that require one; TlsError if they
    are unusable. A pod's certificate must be valid for `name` if given, otherwise for the pod's host. `names` maps
    addresses resolved by DNS back to host names.
    """

    def __init__(
        self,
        files: TlsFiles,
        name: str | None,
        names: Mapping[str, str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._names = names
        self._watched = Watched(files)  # raises the error for unusable files
        self._clock = clock
        self._checked_at = clock()

    def __call__(self, address: str) -> grpc.aio.Channel:
        mine = self._contents()

        def channel() -> grpc.aio.Channel:
            options: list[tuple[str, int | str]] = [*CHANNEL_OPTIONS, *PEER_OPTIONS]
            if name := self._name or self._names.get(address):
                options.append(("grpc.ssl_target_name_override", name))
            return grpc.aio.secure_channel(address, channel_credentials(mine), options=options)

        def renewed() -> grpc.aio.Channel | None:
            nonlocal mine
            if (contents := self._contents()) is mine:
                return None
            mine = contents
            return channel()

        return cast("grpc.aio.Channel", MuxChannel(channel(), renewed))

    def _contents(self) -> Contents:
        """Return the contents of the files. Each call to a pod asks for them, so the files are checked at most once in
        CHECK_SECONDS."""
        now = self._clock()
        if now - self._checked_at >= CHECK_SECONDS:
            self._checked_at = now
            self._watched.changed()
        return self._watched.contents
