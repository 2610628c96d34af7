"""Peers: the pods at which a request's sessions are opened, and the time limits for waiting on them."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.pods.pods import Pods


@dataclass(frozen=True)
class Peers:
    """The verifiers, and the drafts if there are any. Times are in seconds."""

    verifiers: Pods
    drafts: Pods | None = None
    patience_seconds: float = 0.05  # longest time a step may be delayed for expected candidates
    silence_seconds: float = 1.5  # a peer sends every 0.25 s; after this long without a message, it is lost
    stuck_seconds: float = 2.0  # longest step, however short others are, before the text goes to another pod
    failover_seconds: float = 30.0  # longest time without progress before the request fails
    drafts_are_trusted: bool = False  # to influence which tokens are chosen, as some acceptance rules allow

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
