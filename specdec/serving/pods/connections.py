"""Channels to pods, with TLS or without."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import grpc

from specdec.client.tls_files import TlsFiles, channel_credentials
from specdec.serving.mux.channel import MuxChannel
from specdec.serving.process.server import CHANNEL_OPTIONS, PEER_OPTIONS
from specdec.serving.watched import Watched


def connect(address: str) -> grpc.aio.Channel:
    """Return a channel to a pod: all sessions there share one multiplexed connection."""
    channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS + PEER_OPTIONS)
    return cast("grpc.aio.Channel", MuxChannel(channel))


class SecureConnections:
    """Channels to pods, with TLS: a function like `connect`.

    `files`: the authorities that pods' certificates must be of, and our own certificate for pods that ask for one;
    TlsError if they cannot be used. A certificate must be for the `name` that is given, else for the host that the pod
    was found by, of which `names` has those of addresses that come from DNS.
    """

    def __init__(self, files: TlsFiles, name: str | None, names: Mapping[str, str]) -> None:
        self._files = files
        self._name = name
        self._names = names
        Watched(files)  # so that wrong ones are told at start

    def __call__(self, address: str) -> grpc.aio.Channel:
        watched = Watched(self._files)

        def channel() -> grpc.aio.Channel:
            options: list[tuple[str, int | str]] = [*CHANNEL_OPTIONS, *PEER_OPTIONS]
            if name := self._name or self._names.get(address):
                options.append(("grpc.ssl_target_name_override", name))
            return grpc.aio.secure_channel(address, channel_credentials(watched.contents), options=options)

        renewed = MuxChannel(channel(), lambda: channel() if watched.changed() else None)
        return cast("grpc.aio.Channel", renewed)
