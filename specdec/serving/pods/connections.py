"""Channels to pods, with TLS or without."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import grpc

from specdec.serving.mux.channel import MuxChannel
from specdec.serving.process.server import CHANNEL_OPTIONS, PEER_OPTIONS
from specdec.serving.watched import Watched
from specdec.wire.tls_files import TlsFiles, channel_credentials


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

    def __init__(self, files: TlsFiles, name: str | None, names: Mapping[str, str]) -> None:
        self._files = files
        self._name = name
        self._names = names
        Watched(files)  # so that unusable files fail at start

    def __call__(self, address: str) -> grpc.aio.Channel:
        watched = Watched(self._files)

        def channel() -> grpc.aio.Channel:
            options: list[tuple[str, int | str]] = [*CHANNEL_OPTIONS, *PEER_OPTIONS]
            if name := self._name or self._names.get(address):
                options.append(("grpc.ssl_target_name_override", name))
            return grpc.aio.secure_channel(address, channel_credentials(watched.contents), options=options)

        renewed = MuxChannel(channel(), lambda: channel() if watched.changed() else None)
        return cast("grpc.aio.Channel", renewed)
