"""Peer finder: the pods of one revision of a model, at addresses that may change while requests run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import grpc

from orchestrator.pods.peers import Peers
from orchestrator.pods.pods import Pods
from specdec.serving.pods.connections import connect
from specdec.serving.pods.discovery import Discovery
from specdec.wire.address import Address


@dataclass(frozen=True)
class PeerSettings:
    """How to reach pods, the same for all revisions."""

    times: Peers = field(default_factory=lambda: Peers(Pods()))  # holds the time limits; its pods are not used
    connect: Callable[[str], grpc.aio.Channel] = connect
    names: dict[str, str] = field(default_factory=dict)  # host name by DNS address: certificates are for host names


class PeerFinder:
    """Finds the pods of one revision. It owns them and their discoveries."""

    def __init__(self, settings: PeerSettings) -> None:
        self._verifiers, self._drafts = Pods(connect=settings.connect), Pods(connect=settings.connect)
        self._discoveries = [Discovery((), pods, names=settings.names) for pods in (self._verifiers, self._drafts)]
        self.peers = replace(settings.times, verifiers=self._verifiers)

    async def look(self, verifiers: Sequence[Address], drafts: Sequence[Address]) -> None:
        """Replace the addresses of pods. Running texts keep their pods, and move to pods of the new addresses when
        those fail. Without addresses of drafts, new requests are served without drafts."""
        for discovery, addresses in zip(self._discoveries, (verifiers, drafts), strict=True):
            await discovery.look(addresses)
        self.peers = replace(self.peers, drafts=self._drafts if drafts else None)

    async def close(self) -> None:
        """Stop looking, and close all channels; called after the last session."""
        for discovery in self._discoveries:
            await discovery.close()
        await self._verifiers.close()
        await self._drafts.close()
