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
    stuck_seconds: float = 2.0  # of a step, however short steps usually are, before the text is taken elsewhere
    failover_seconds: float = 30.0  # without progress, for a text to be taken up by somebody
    discoveries: Sequence[Discovery] = ()  # who finds the pods

    def check_room(self) -> None:
        """OverloadedError if every verifier has told that it has no room. So much can be said before a request is
        looked at, and in a flood it is the looking that takes time."""
        refusals = [pod.admission.refusal for pod in self.verifiers.willing]
        found = [refusal for refusal in refusals if refusal is not None]
        if found and len(found) == len(refusals):
            raise min(found, key=lambda refusal: refusal.retry_after)

    async def close(self) -> None:
        """After the last session."""
        for discovery in self.discoveries:
            await discovery.close()
        await self.verifiers.close()
        if self.drafts is not None:
            await self.drafts.close()
