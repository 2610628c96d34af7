"""Peer finder: the pods of one revision of a model, found at addresses that may change while requests run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import grpc

from orchestrator.peers import Peers
from orchestrator.pods import Pods
from specdec.client.address import Address
from specdec.serving.pods.connections import connect
from specdec.serving.pods.discovery import Discovery


@dataclass(frozen=True)
class PeerSettings:
    """How pods are reached, those of all revisions alike."""

    times: Peers = field(default_factory=lambda: Peers(Pods()))  # without pods: how long they are waited for
    connect: Callable[[str], grpc.aio.Channel] = connect
    names: dict[str, str] = field(default_factory=dict)  # of targets that come from DNS: certificates are for these


class PeerFinder:
    """Finds the pods of one revision. It owns them and their discoveries."""

    def __init__(self, settings: PeerSettings) -> None:
        self._verifiers, self._drafts = Pods(connect=settings.connect), Pods(connect=settings.connect)
        self._discoveries = [Discovery((), pods, names=settings.names) for pods in (self._verifiers, self._drafts)]
        self.peers = replace(settings.times, verifiers=self._verifiers)

    async def look(self, verifiers: Sequence[Address], drafts: Sequence[Address]) -> None:
        """Look for the pods at these addresses from now on. Texts that run go on, with pods of the new addresses where
        theirs fail. Without addresses of drafts, requests that come from now on are served as where there are none."""
        for discovery, addresses in zip(self._discoveries, (verifiers, drafts), strict=True):
            await discovery.look(addresses)
        self.peers = replace(self.peers, drafts=self._drafts if drafts else None)

    async def close(self) -> None:
        """Stop looking, and close all channels; called after the last session."""
        for discovery in self._discoveries:
            await discovery.close()
        await self._verifiers.close()
        await self._drafts.close()
