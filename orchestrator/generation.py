"""One sample's life: open both streams, relay candidates one way and commits the other, yield text.

The committed text is the only truth and lives here; the trees and caches of draft and verifier can be
rebuilt from it. A draft that is missing, foreign or lost costs speed, nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

import grpc
import structlog

from orchestrator.admission import Admission
from orchestrator.links import DraftLink, DraftUnusableError, VerifierLink
from orchestrator.request import Model, Sample
from orchestrator.text import TextStream
from specdec.decoding.sampling import Rule
from specdec.serving.errors import PeerLostError
from specdec.v1 import draft_pb2, generation_pb2, model_pb2, verifier_pb2

log = structlog.get_logger()

AHEAD = 0.1
"""What will be worth verifying a step later lies below what is verified now: it is grown from this part of the price
on, or from the draft's own least reach, if that is more. (A whole price left nothing to grow ahead; 0.3 of it was too
much still, by `python -m bench.simulate`.)"""

KEEP_UP_EVERY = 64
"""Tokens of which a draft that rests is told together, so that it has little to read when it is wanted again."""

EXTENDS_A_STEP = 4
"""Messages of candidates that a verifier's step is worth, where it can take so many: the fresher they are when the
step begins, the more of them count, and a network that is slow is hidden."""

EXTEND_US = 3000
"""Time between two messages, over all sessions of a verifier, that costs it little: each takes its interpreter half a
millisecond."""

CONSUMED_EVERY = 64
"""Tokens between two reports to the verifier of how far the client has read."""


@dataclass(frozen=True)
class Peers:
    """Where sessions are opened, and how they are paced."""

    verifier: grpc.aio.Channel
    draft: grpc.aio.Channel | None
    admission: Admission = field(default_factory=Admission)
    patience_seconds: float = 0.05
    silence_seconds: float = 5.0  # a peer that says nothing for so long is lost


@dataclass
class Statistics:
    """What speculation did for one sample. Tokens past a stop string count as overrun only."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    overrun: int = 0
    histogram: Counter[int] = field(default_factory=Counter)
    sources: Counter[str] = field(default_factory=Counter)
    undrafted_reason: str = ""

    def message(self) -> generation_pb2.SpeculationStatistics:
        most = max(self.histogram, default=-1)
        return generation_pb2.SpeculationStatistics(
            steps=self.steps,
            drafted=self.drafted,
            accepted=self.accepted,
            overrun=self.overrun,
            accepted_histogram=[self.histogram[i] for i in range(most + 1)],
            undrafted_reason=self.undrafted_reason,
            sources=self.sources,
        )


def source_name(source: model_pb2.TokenSource.ValueType) -> str:
    return model_pb2.TokenSource.Name(source).removeprefix("TOKEN_SOURCE_").lower()


class Generation:
    """Runs one sample."""

    def __init__(self, sample: Sample, model: Model, peers: Peers, deadline: float | None) -> None:
        self._sample = sample
        self._model = model
        self._peers = peers
        self._deadline = deadline
        self._arrived = time.monotonic()
        self._committed = list(sample.generated)  # generated tokens that are final
        self._statistics = Statistics()
        self._text = TextStream(model.tokenizer, sample.prompt, sample.stop)
        self._for_draft: asyncio.Queue[draft_pb2.DraftRequest] = asyncio.Queue()
        self._untold = model_pb2.Committed()  # to the draft
        self._found = 0  # tokens that the verifier had in memory already
        self._step_us = 0.0  # moving average of T_v
        self._draft_policy = draft_pb2.DraftPolicy(
            max_depth=sample.speculation.max_depth, max_branches=sample.speculation.max_branches
        )
        self._verifier_policy = verifier_pb2.VerifyPolicy(
            speculate=False,
            max_candidates=sample.speculation.max_candidates,
            patience_us=int(1e6 * peers.patience_seconds),
            always=sample.speculation.always,
        )

    async def run(self) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        """Responses of this sample; the last one carries `finish`."""
        sample = self._sample
        for token in sample.generated:
            self._text.push(token)  # what the client has already seen
        async with VerifierLink(self._peers.verifier, self._timeout(), self._peers.silence_seconds) as verifier:
            wants_draft = sample.speculation.enabled and self._peers.draft is not None
            if sample.rule is Rule.CONTRASTIVE and not wants_draft:
                raise _draft_required("there is none")
            if not wants_draft:
                self._statistics.undrafted_reason = "no_draft" if sample.speculation.enabled else "off"
            # The verifier may wait for the first candidates only if a draft is being opened.
            self._verifier_policy.speculate = wants_draft
            relay: asyncio.Task[None] | None = None
            try:
                async with self._peers.admission.opening():
                    if wants_draft:
                        relay = asyncio.create_task(self._drafting(verifier))
                    await verifier.open(sample, self._model, self._verifier_policy)
                self._draft_policy.max_nodes = verifier.max_nodes
                reported = 0
                async for commit in verifier.commits():
                    self._check_place(commit)
                    self._tell_draft(commit)
                    response = self._response(commit, verifier.identity)
                    yield response
                    if response.HasField("finish"):
                        return
                    if len(self._committed) - reported >= CONSUMED_EVERY:
                        reported = len(self._committed)
                        await verifier.consumed(reported)
            finally:
                if relay is not None:
                    relay.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await relay

    async def _drafting(self, verifier: VerifierLink) -> None:
        """Keep a draft at work for as long as there is one: push what it guesses to the verifier.

        Whatever goes wrong here ends the drafting, never the request.
        """
        assert self._peers.draft is not None
        try:
            async with DraftLink(self._peers.draft, self._timeout(), self._peers.silence_seconds) as draft:
                # Commits that are queued while the draft opens may overlap the text it opens with; it cuts
                # them to their news.
                await draft.open(self._sample, list(self._committed), self._model, self._draft_policy)
                feeding = asyncio.create_task(self._feed(draft))
                try:
                    async for extend in draft.extensions():
                        await verifier.extend(extend)
                finally:
                    feeding.cancel()
        except DraftUnusableError as error:
            await self._undrafted(verifier, error.reason, str(error))
        except Exception as error:
            await self._undrafted(verifier, "draft_lost", repr(error))

    async def _undrafted(self, verifier: VerifierLink, reason: str, why: str) -> None:
        if self._sample.rule is Rule.CONTRASTIVE:
            verifier.give_up(_draft_required(why))
            return
        self._statistics.undrafted_reason = reason
        log.warning("undrafted", reason=reason, why=why)
        self._verifier_policy.speculate = False
        await verifier.policy(self._verifier_policy)

    async def _feed(self, draft: DraftLink) -> None:
        """Send what is queued. In a task of its own, so that a draft that does not read stalls nobody."""
        while True:
            await draft.send(await self._for_draft.get())

    def _check_place(self, commit: verifier_pb2.Commit) -> None:
        """A commit that does not follow on means that one is lost, and the text with it."""
        here, base = len(self._sample.prompt) + len(self._committed), commit.committed.base
        if base != here:
            raise PeerLostError(f"verifier: a commit at {base} tokens, the text has {here}", "VERIFIER_LOST")

    def _tell_draft(self, commit: verifier_pb2.Commit) -> None:
        """Queue what the target decided, and what is worth guessing; while nothing is, keep it."""
        if not self._verifier_policy.speculate:
            return  # no draft, or none any more
        if commit.step_us:  # else it tells of steps long past
            self._step_us += 0.2 * (commit.step_us - self._step_us) if self._step_us else commit.step_us
        told, policy = self._draft_policy, self._pacing(commit)
        if _differ(policy.min_reach, told.min_reach) or _differ(policy.extend_interval_us, told.extend_interval_us):
            self._draft_policy = policy
            self._for_draft.put_nowait(draft_pb2.DraftRequest(policy=policy))
        if not self._untold.tokens:
            self._untold.base = commit.committed.base
        self._untold.tokens.extend(commit.committed.tokens)
        if self._draft_policy.min_reach < 1 or len(self._untold.tokens) >= KEEP_UP_EVERY:
            self._for_draft.put_nowait(draft_pb2.DraftRequest(committed=self._untold))
            self._untold = model_pb2.Committed()

    def _pacing(self, commit: verifier_pb2.Commit) -> draft_pb2.DraftPolicy:
        """The draft's policy as it should be now. Besides candidates for a verifier that has none, it sends several
        messages a step, but no more than all sessions together may, and one at least."""
        policy = draft_pb2.DraftPolicy()
        policy.CopyFrom(self._draft_policy)
        pause = max(self._step_us / EXTENDS_A_STEP, EXTEND_US * commit.drafted_sessions)
        policy.extend_interval_us = int(min(self._step_us, pause))
        if self._sample.rule is not Rule.CONTRASTIVE:  # which needs the draft, whether or not candidates pay
            policy.min_reach = AHEAD * commit.price if commit.price < 1 else 1.0
        return policy

    def _response(
        self, commit: verifier_pb2.Commit, identity: model_pb2.ModelIdentity
    ) -> generation_pb2.GenerateResponse:
        """Take a commit into the text: cut at a stop string, counted exactly."""
        statistics = self._statistics
        tokens = list(commit.committed.tokens)
        reason = commit.finish_reason
        pieces: list[str] = []
        stop, kept = "", len(tokens)
        for index, token in enumerate(tokens):
            if reason == model_pb2.FINISH_REASON_STOP and index == len(tokens) - 1:
                pieces.append("")  # the end token is committed, not spelt
                break
            spelt = self._text.push(token)
            pieces.append(spelt.text)
            if spelt.stop:
                stop, kept = spelt.stop, index + 1
                reason = model_pb2.FINISH_REASON_STOP
                break
        if reason and not stop:
            spelt = self._text.finish()
            pieces[-1] += spelt.text
            if spelt.stop:
                stop, reason = spelt.stop, model_pb2.FINISH_REASON_STOP
        accepted = min(commit.accepted, kept)
        self._committed += tokens[:kept]
        self._found += commit.found_tokens
        statistics.steps += commit.steps
        statistics.drafted += commit.offered
        statistics.accepted += accepted
        statistics.histogram[accepted] += commit.steps
        statistics.overrun += len(tokens) - kept
        statistics.sources.update(source_name(source) for source in commit.sources[:kept])
        response = generation_pb2.GenerateResponse(
            index=self._sample.index,
            text="".join(pieces),
            token_texts=pieces,
            tokens=tokens[:kept],
            sources=commit.sources[:kept],
            logprobs=commit.logprobs[:kept],
            timings=generation_pb2.ChunkTimings(
                elapsed_us=int(1e6 * (time.monotonic() - self._arrived)),
                forward_us=commit.forward_us,
                step_us=commit.step_us,
                queued_us=commit.queued_us,
            ),
            steps=commit.steps,
            drafted=commit.offered,
        )
        if reason:
            response.finish.CopyFrom(
                generation_pb2.Finish(
                    reason=reason,
                    stop=stop,
                    usage=generation_pb2.Usage(
                        prompt_tokens=len(self._sample.prompt),
                        completion_tokens=len(self._committed),
                        found_tokens=self._found,
                    ),
                    speculation=statistics.message(),
                    numerics_fingerprint=identity.numerics_fingerprint,
                    reproducible=self._sample.rule is Rule.COUPLED,
                    numerics_mode=identity.numerics_mode,
                    preemptions=commit.preemptions,
                )
            )
        return response

    def _timeout(self) -> float | None:
        """Seconds left of the caller's deadline, which gRPC does not pass on by itself."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())


def _differ(new: float, told: float) -> bool:
    """Enough to be worth a message; to 1, and from there, always."""
    return abs(new - told) > 0.3 * max(new, told) or (new >= 1) is not (told >= 1)


def _draft_required(why: str) -> PeerLostError:
    return PeerLostError(f"the CONTRASTIVE rule needs a draft: {why}", "DRAFT_REQUIRED")
