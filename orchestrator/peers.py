"""Where a request's sessions are opened, and how patient it is with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.discovery import Discovery
from orchestrator.pods import Pods


@dataclass(frozen=True)
class Peers:
    """Verifiers, and drafts if there are any. Times in seconds."""

    verifiers: Pods
    drafts: Pods | None = None
    patience_seconds: float = 0.05  # longest time a step may be put off for expected candidates
    silence_seconds: float = 1.5  # a peer says something every quarter of one: after this it is lost
    failover_seconds: float = 30.0  # without progress, for a text to be taken up by somebody
    discoveries: Sequence[Discovery] = ()  # who finds the pods

    async def close(self) -> None:
        """After the last session."""
        for discovery in self.discoveries:
            await discovery.close()
        await self.verifiers.close()
        if self.drafts is not None:
            await self.drafts.close()
