"""The orchestrator's end of a session at a verifier."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

from orchestrator.generation.peer_stream import PeerStream
from orchestrator.generation.sample_context import SampleContext
from orchestrator.pods.errors import LostError, UnfitError, check_verifier
from orchestrator.pods.pods import Pod
from specdec.decoding.sampling import Rule
from specdec.serving import checksum
from specdec.serving.errors import NotBuiltError, PeerLostError
from specdec.serving.messages import rule_message
from specdec.v2 import model_pb2, verifier_pb2, verifier_pb2_grpc

STUCK_STEPS = 20
"""Multiple of the expected step latency beyond which a step counts as stuck. Load or a busy machine makes a step only a
few times as long."""

MAX_GRANTED_NODES = 1 << 16
"""Largest `max_nodes` to accept from a verifier: far above any real grant, but low enough to bound what a draft may
send (`CandidateFlow`)."""

CONSUMED_EVERY = 64
"""Tokens between two reports of the client's progress to the verifier: a quarter of the lead that the verifier allows
(`max_unread_tokens`), so that a steady reader is not throttled."""

UNREPORTED_CAPACITY = model_pb2.PodCapacity(room=2**16)
"""Capacity assumed for a pod that reports none: it gets sessions until it refuses them."""


class VerifierStream(PeerStream):
    """The stream of a session at a verifier."""

    peer = "verifier"

    def __init__(self, pod: Pod, context: SampleContext, longest_step: Callable[[], float]) -> None:
        """Prepare a stream. `longest_step` returns the minimum age in seconds of a step that counts as stuck."""
        super().__init__(pod, context)
        self._longest_step = longest_step
        self._checksum = 0  # over the opening and all commits
        self._policy = verifier_pb2.VerifyPolicy()  # as last sent
        # As last reported: generated tokens read by the client, and tokens of the prompt with log-probabilities.
        self._consumed = verifier_pb2.Consumed(tokens=len(context.text.generated), scored_tokens=context.text.scored)

    async def open(
        self, policy: verifier_pb2.VerifyPolicy, *, attempt: int, model_fingerprint: str
    ) -> verifier_pb2.VerifyOpened:
        """Open the session with the current text, and return the verifier's answer; UnfitError if the pod serves
        something else, such as a model with another fingerprint than this one (empty: any)."""
        self._policy = policy
        sample = self._context.sample
        message = verifier_pb2.VerifyOpen(
            prompt_tokens=sample.prompt,
            generated_tokens=self._context.text.generated,
            sampling=sample.sampling_message,
            rule=rule_message(sample.rule),
            contrast=sample.contrast if sample.rule is Rule.CONTRASTIVE else None,
            typicality=sample.typicality if sample.rule is Rule.TYPICAL else None,
            max_tokens=max(1, sample.max_tokens),  # 0: the session is closed after the prompt
            end_tokens=sorted(sample.end_tokens),
            min_tokens=sample.min_tokens,
            grammar=sample.grammar,
            rejected_candidates=sample.rejected_candidates,
            top_logprobs=sample.top_logprobs,
            policy=policy,
            tenant=sample.tenant,
            tenant_weight=sample.weight,
            priority=sample.priority,
            attempt=attempt,
            coalesce_commits=sample.coalesce_commits,
            prompt_logprobs=sample.prompt_logprobs if self._context.text.unscored else None,
            scored_tokens=self._context.text.scored if self._context.text.unscored else 0,
            cache_salt=sample.cache_salt,
        )
        message.sampling.seed = sample.sampling.seed
        message.checksum = self._checksum = checksum.of_opening(message)
        stub = verifier_pb2_grpc.VerifierServiceStub(self.pod.channel)
        opened: verifier_pb2.VerifyOpened = await self._begin(stub.Verify, verifier_pb2.VerifyRequest(open=message))
        self._check_opened(opened, model_fingerprint)
        self._context.granted.by_verifier(opened)
        self.pod.numerics = opened.identity.numerics_fingerprint
        self.pod.context_tokens = opened.identity.context_tokens
        self.pod.load.report(opened.capacity if opened.HasField("capacity") else UNREPORTED_CAPACITY)
        self.opened = True
        return opened

    def _check_opened(self, opened: verifier_pb2.VerifyOpened, model_fingerprint: str) -> None:
        """Raise UnfitError if the verifier serves something else, LostError if its grants are out of range or if its
        answer was corrupted in transit."""
        if opened.HasField("checksum") and opened.checksum != checksum.of_opening(opened):
            raise LostError("the checksum of `opened` is wrong: it was changed in transit")
        identity = opened.identity
        check_verifier(identity, self._context.model)
        if not 0 <= opened.min_candidate_probability <= 1 or opened.max_nodes > MAX_GRANTED_NODES:
            raise LostError(
                f"it grants {opened.max_nodes} candidates, with a min_candidate_probability of "
                f"{opened.min_candidate_probability}"
            )
        sample, sampling = self._context.sample, self._context.sample.sampling
        for needed, offered, what in (
            (sample.grammar is not None, opened.follows_grammar, "support grammars"),
            (self._context.text.unscored, opened.scores_prompt, "return log-probabilities of prompts"),
            (sampling.banned_sequences, opened.bans_sequences, "ban words of several tokens"),
            (sampling.typical_p < 1.0, opened.applies_typical_p, "apply typical_p"),
            (sample.cache_salt, opened.salts_cache, "separate its caches by cache_salt"),
        ):
            if needed and not offered:
                raise UnfitError(NotBuiltError(f"verifier: does not {what}"))
        if model_fingerprint and identity.model_fingerprint != model_fingerprint:
            raise UnfitError(
                PeerLostError(
                    f"verifier: serves revision {identity.model_fingerprint[:16]} of {identity.model!r}, the "
                    f"text was started with {model_fingerprint[:16]}",
                    "MODEL_CHANGED",
                )
            )

    async def messages(
        self,
    ) -> AsyncGenerator[
        verifier_pb2.Commit
        | verifier_pb2.PromptLogprobs
        | model_pb2.DraftQuery
        | model_pb2.Features
        | model_pb2.Heartbeat,
        None,
    ]:
        """Yield log-probabilities of the prompt if requested, commits until the last one, queries to the draft if the
        text needs one, features if its draft reads them, and heartbeats while the text waits for its draft."""
        while True:
            response = await self._read()
            match response.WhichOneof("message"):
                case "commit":
                    self._heard(response.commit)
                    yield response.commit
                    if response.commit.finish_reason:
                        return
                case "prompt_logprobs" if self._context.sample.prompt_logprobs is not None:
                    yield response.prompt_logprobs
                case "query" if self._context.sample.needs_draft:
                    yield response.query
                case "features":
                    yield response.features
                case "heartbeat":
                    self._count_heartbeat()
                    self._look_at(response.heartbeat)
                    if response.heartbeat.awaits_draft and self._context.sample.needs_draft:
                        yield response.heartbeat
                case _:  # a newer verifier may send unknown messages now and then
                    self._count_heartbeat()

    def _heard(self, commit: verifier_pb2.Commit) -> None:
        self._checksum = checksum.extended(self._checksum, commit.committed.tokens, commit.finish_reason)
        if commit.checksum != self._checksum:
            raise LostError("the checksum of a commit is wrong: a message was lost or changed in transit")

    def _look_at(self, heartbeat: model_pb2.Heartbeat) -> None:
        """Record a heartbeat's capacity; LostError if the verifier's step is stuck. Heartbeats come from the event
        loop, so only the age of a step shows that the worker is alive. The step need not include this session, which
        may be waiting for memory, its draft or its reader. A heartbeat that waited to be read counts for nothing."""
        if not self.is_current:
            return
        if heartbeat.HasField("capacity"):
            self.pod.load.report(heartbeat.capacity)
        age, expected = heartbeat.step_age_us / 1e6, heartbeat.step_expected_us / 1e6
        if age > STUCK_STEPS * expected and age > self._longest_step():
            raise LostError(f"a step has lasted {age:.1f} s, {expected:.3f} s expected", conclusive=True)

    async def extend(self, extend: model_pb2.Extend) -> None:
        await self._write(verifier_pb2.VerifyRequest(extend=extend))

    async def set_policy(self, policy: verifier_pb2.VerifyPolicy) -> None:
        if policy != self._policy:
            self._policy = policy
            await self._write(verifier_pb2.VerifyRequest(policy=policy))

    async def set_first_policy(self, policy: verifier_pb2.VerifyPolicy) -> None:
        """Send the policy between two reads. The watchdog limits the write: a pod that does not read counts as
        silent."""
        with self._watchdog.listening():
            await self.set_policy(policy)

    async def consumed(self) -> None:
        """Report that the client has read the text so far: every `CONSUMED_EVERY` tokens, and at the end of a prompt
        with log-probabilities. The stream is not read during the write, so the watchdog limits it."""
        text, consumed = self._context.text, self._consumed
        new, scored = len(text.generated) - consumed.tokens, text.scored - consumed.scored_tokens
        if max(new, scored) < CONSUMED_EVERY and (not scored or text.unscored):
            return
        self._consumed = verifier_pb2.Consumed(tokens=len(text.generated), scored_tokens=text.scored)
        with self._watchdog.listening():
            await self._write(verifier_pb2.VerifyRequest(consumed=self._consumed))
