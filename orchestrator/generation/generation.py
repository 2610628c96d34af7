"""The run of one sample: commits come in, the draft receives them, the client gets the text.

`Verification` owns the session at a verifier, `Drafting` the session at a draft. `Drafting` sends its candidates to
`Verification`. `SampleTranscript` turns commits into responses.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager

from orchestrator.generation.drafting import Drafting
from orchestrator.generation.sample_context import GrantedLimits, SampleContext
from orchestrator.generation.verification import Verification
from orchestrator.models.revision import Revision
from orchestrator.pods.peers import Peers
from orchestrator.pods.prefix_routing import PrefixAnswers
from orchestrator.requests.sample import CommittedText, Sample, resolved
from orchestrator.text.request_timeline import SampleTimeline
from orchestrator.text.transcript import SampleTranscript
from specdec.decoding.sampling import Rule
from specdec.v2 import generation_pb2, model_pb2, verifier_pb2


class Generation:
    """Runs one sample."""

    def __init__(
        self,
        sample: Sample,
        revision: Revision,
        peers: Peers,
        deadline: float | None,
        timeline: SampleTimeline,
        prefixes: PrefixAnswers | None = None,
    ) -> None:
        """Prepare to run a sample of a request, with the revision and the peers chosen when the request arrived. All
        samples of a request share its `prefixes`."""
        stats = revision.stats
        self._asked_as = revision.asked_as
        self._readiness = revision.readiness
        self._resuming = revision.resuming
        self._stats = stats
        text = CommittedText(sample)
        self._context = SampleContext(
            sample,
            revision.model,
            peers,
            deadline,
            text,
            GrantedLimits(sample.speculation),
            timeline,
            grammar_watch=None if revision.grammars is None else revision.grammars.watch(sample, text, peers),
            fallback_seconds=stats.fallback_seconds,
            prefixes=prefixes or PrefixAnswers(),
        )
        self._transcript = SampleTranscript(sample, revision.model, timeline.began)
        self._verification = Verification(self._context)
        self._drafting = Drafting(self._context, sink=self._verification)
        self._complete = False  # the last response was made

    async def run(self) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        """Yield the responses of this sample; the last one carries `finish`."""
        first = uncommitted = True
        await self._transcript.resume(self._resuming)
        timeline = self._context.timeline
        with (
            self._stats.sample(self._transcript) as tokens_arrived,
            timeline.figures(self._transcript),
            self._leaving(),
        ):
            async with self._drafting, aclosing(self._verification.messages()) as messages:
                async for message in messages:
                    response: generation_pb2.GenerateResponse | None = None
                    match message:
                        case verifier_pb2.VerifyOpened():
                            self._drafting.on_opened(message)
                        case model_pb2.Heartbeat():  # `VerifierStream` yields only those with `awaits_draft`
                            self._drafting.on_awaited()
                        case model_pb2.DraftQuery():
                            self._drafting.on_query(message)
                        case model_pb2.Features():
                            self._drafting.on_features(message)
                        case verifier_pb2.PromptLogprobs():
                            response = self._transcript.score(message)
                        case verifier_pb2.Commit():
                            self._drafting.on_commit(message)
                            response = self._transcript.add_commit(message)
                            if response is None:
                                await self._verification.consumed()
                            else:
                                tokens_arrived(len(response.tokens))
                                if uncommitted:
                                    uncommitted = False
                                    timeline.first_commit()
                    if response is None:
                        continue
                    if first:
                        response.model_fingerprint = self._verification.model_fingerprint
                        self._readiness.served(response.model_fingerprint)
                        response.resolved.CopyFrom(resolved(self._context.sample, self._asked_as))
                        first = False
                    if response.HasField("finish"):
                        self._drafting.on_finish()
                        self._complete_finish(response.finish)
                        timeline.finish(response.finish)
                        self._complete = True
                        yield response
                        return
                    yield response
                    # The consumer, `coalesced`, asks for more: the response counts as read by the client. `coalesced`
                    # may still hold it for the next one, which matters little to the verifier's limit on unread tokens.
                    await self._verification.consumed()

    @contextmanager
    def _leaving(self) -> Iterator[None]:
        """Within this context, record a cancellation by the caller before the text is complete."""
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit):
            if not self._complete:
                self._verification.cancelled()
            raise

    def _complete_finish(self, finish: generation_pb2.Finish) -> None:
        """Add the text's numerics and the events of its sessions to `finish`."""
        verification = self._verification
        finish.numerics_fingerprint = verification.identity.numerics_fingerprint
        finish.numerics_mode = verification.identity.numerics_mode
        finish.reproducible = self._context.sample.rule is Rule.COUPLED and not verification.numerics_changed
        finish.preemptions = verification.preemptions
        finish.kept_for_learning = bool(self._context.keepers)
        speculation = finish.speculation
        speculation.undrafted_reason = self._drafting.undrafted_reason
        # At most the tokens sent: some undrafted ones may lie beyond a stop string.
        speculation.undrafted_tokens = min(self._drafting.undrafted_tokens, sum(speculation.sources.values()))
        speculation.granted.CopyFrom(self._context.granted.message())
        speculation.failover_events.update(self._context.timeline.failover_events)
