"""The run of one sample: commits come in, the draft receives them, the client gets the text.

Three objects share the work: the `Transcript` has the text, the `Verification` the session at a verifier, and the
`Drafting` the session at a draft.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from orchestrator.drafting import Drafting
from orchestrator.failover_events import FailoverEvents
from orchestrator.peers import Peers
from orchestrator.request import Model, Sample
from orchestrator.transcript import Transcript
from orchestrator.verification import Verification
from specdec.decoding.sampling import Rule
from specdec.v2 import generation_pb2


class Generation:
    """Runs one sample."""

    def __init__(self, sample: Sample, model: Model, peers: Peers, deadline: float | None) -> None:
        self._sample = sample
        self._events = FailoverEvents()
        self._transcript = Transcript(sample, model)
        self._drafting = Drafting(sample, model, peers, self._transcript, self._events, deadline)
        self._verification = Verification(
            sample, model, peers, self._transcript, self._drafting, self._events, deadline
        )

    async def run(self) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        """Yield the responses of this sample; the last one carries `finish`."""
        first = True
        await self._transcript.resume()
        async with self._drafting, aclosing(self._verification.commits()) as commits:
            async for commit in commits:
                self._drafting.on_commit(commit)
                response = self._transcript.take(commit)
                if first:
                    response.model_fingerprint = self._verification.revision
                    first = False
                if response.HasField("finish"):
                    self._sign(response.finish)
                yield response
                if response.HasField("finish"):
                    return

    def _sign(self, finish: generation_pb2.Finish) -> None:
        """Enter into `finish` the numerics that made the text, and what happened to its sessions."""
        verification = self._verification
        finish.numerics_fingerprint = verification.identity.numerics_fingerprint
        finish.numerics_mode = verification.identity.numerics_mode
        finish.reproducible = self._sample.rule is Rule.COUPLED and not verification.numerics_changed
        finish.preemptions = verification.preemptions
        finish.speculation.undrafted_reason = self._drafting.undrafted_reason
        finish.speculation.failover_events.update(self._events.counts)
