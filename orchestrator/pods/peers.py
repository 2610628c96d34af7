"""Peers: the pods for a request's sessions, found at addresses that may change while requests run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import grpc

from orchestrator.pods.pods import Pods
from specdec.serving.pods.connections import connect
from specdec.serving.pods.discovery import Discovery
from specdec.wire.address import Address


@dataclass(frozen=True)
class Peers:
    """The verifiers, and the drafts if there are any. Times are in seconds."""

    verifiers: Pods
    drafts: Pods | None = None
    patience_seconds: float = 0.05  # longest time a step may be delayed for expected candidates
    silence_seconds: float = 1.5  # a peer sends every 0.25 s; after this long without a message, it is lost
    stuck_seconds: float = 2.0  # a step up to this long never counts as stuck, however short others are
    failover_seconds: float = 30.0  # longest time without progress before the request fails
    drafts_are_trusted: bool = False  # drafts may influence the choice of tokens, as some acceptance rules allow

    def check_room(self, tenant: str) -> None:
        """Raise OverloadedError if every verifier has reported no room for a request of this tenant. Refusing before
        parsing matters in a flood, where parsing takes most of the time."""
        refusals = [pod.admission.refusal(tenant) for pod in self.verifiers.willing]
        found = [refusal for refusal in refusals if refusal is not None]
        if found and len(found) == len(refusals):
            raise min(found, key=lambda refusal: refusal.retry_after)

    async def close(self) -> None:
        """Close all channels; called after the last session."""
        await self.verifiers.close()
        if self.drafts is not None:
            await self.drafts.close()


@dataclass(frozen=True)
class PeerSettings:
    """How to reach pods; the same for all revisions."""

    peers: Callable[[Pods], Peers] = Peers  # makes the peers of a revision, with the time limits
    connect: Callable[[str], grpc.aio.Channel] = connect
    names: dict[str, str] = field(default_factory=dict)  # host name by DNS address: certificates are for host names


class PeerFinder:
    """Finds the pods of one revision. It owns them and their discoveries."""

    def __init__(self, settings: PeerSettings) -> None:
        self._verifiers, self._drafts = Pods(connect=settings.connect), Pods(connect=settings.connect)
        self._discoveries = [Discovery((), pods, names=settings.names) for pods in (self._verifiers, self._drafts)]
        self.peers = settings.peers(self._verifiers)

    async def look(self, verifiers: Sequence[Address], drafts: Sequence[Address]) -> None:
        """Replace the addresses of pods. Running texts keep their pods until these fail, then move to pods of the new
        addresses. Without addresses of drafts, new requests are served without drafts."""
        for discovery, addresses in zip(self._discoveries, (verifiers, drafts), strict=True):
            await discovery.look(addresses)
        self.peers = replace(self.peers, drafts=self._drafts if drafts else None)

    async def close(self) -> None:
        """Stop looking, and close all channels; called after the last session."""
        for discovery in self._discoveries:
            await discovery.close()
        await self._verifiers.close()
        await self._drafts.close()
