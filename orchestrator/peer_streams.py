"""Peer streams: the orchestrator's ends of a sample's sessions, one at a verifier pod and one at a draft pod."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Any, Self

import grpc
import structlog

from orchestrator.pods import Pod
from orchestrator.request import Model, Sample
from orchestrator.watchdog import Watchdog
from specdec.serving import checksum
from specdec.serving.echo import cut
from specdec.serving.errors import DeadlineError, NotBuiltError, PeerLostError, ProtocolError, ServiceError, from_rpc
from specdec.serving.identity import PROTOCOL_VERSION
from specdec.serving.interceptor import request_id
from specdec.serving.messages import rule_message, sampling_message
from specdec.v2 import draft_pb2, draft_pb2_grpc, model_pb2, verifier_pb2, verifier_pb2_grpc

STUCK_STEPS = 20
"""Number of steps of its size for whose time a step may last; after that it is stuck, or might as well be."""

DEADLINE_SLACK_SECONDS = 0.1

MAX_LOGGED_BYTES = 1024
"""Bytes of a peer's reason for ending a session that our log repeats."""

MAX_IDENTITY_BYTES = 4096
MAX_GRANTED_NODES = 1 << 16

MAX_HEARTBEATS = 64
HEARTBEATS_A_SECOND = 16
"""Heartbeats that may come at once, and a second in the long run: four times as many as a peer should send."""

log = structlog.get_logger()

Call = grpc.aio.StreamStreamCall[Any, Any]

STREAM_IS_OVER = (asyncio.InvalidStateError, grpc.aio.UsageError, grpc.aio.AioRpcError)
"""Exceptions of writing to a stream that has ended."""


class LostError(Exception):
    """The session is gone; another pod may resume its text. `conclusive`: the pod is gone as well, for all sessions."""

    def __init__(self, message: str, *, conclusive: bool = False) -> None:
        super().__init__(message)
        self.conclusive = conclusive


class UnfitError(Exception):
    """The pod works, but serves something else. `error` is for the client, if there is no other pod."""

    def __init__(self, error: ServiceError) -> None:
        super().__init__(str(error))
        self.error = error


class OtherTokenizerError(UnfitError):
    """The pod's model has another tokenizer: it can serve no request here."""


class PeerStream:
    """A session at a pod. Used as a context manager: leaving it ends the session."""

    peer = "peer"

    def __init__(self, pod: Pod, timeout: float | None, silence: float) -> None:
        self.pod = pod
        self._timeout = timeout
        self._silence = silence
        self._watchdog = Watchdog(silence, self._on_silence)
        self.opened = False
        self._call: Call | None = None
        self._aborted_by: Exception | None = None
        # Heartbeats that it may still send, as of the time of the last one.
        self._heartbeats, self._last_heartbeat = float(MAX_HEARTBEATS), 0.0
        self._writing = asyncio.Lock()  # gRPC takes one write at a time; waiters go in order

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watchdog.stop()
        self.abort(LostError("the session was left"))

    def abort(self, error: Exception) -> None:
        """End the session: a read raises the error, a write does nothing."""
        if self._aborted_by is None:
            self._aborted_by = error
            if self._call is not None:
                self._call.cancel()

    async def _begin(self, method: Any, request: Any) -> Any:
        """Start the stream, and return the answer to its first request."""
        self._call = method(timeout=self._timeout, metadata=request_id())
        self._watchdog.start()
        with self._watchdog.listening():  # a connection that does not come about is silence too
            await self._write(request)
        response = await self._read()
        if response.WhichOneof("message") != "opened":
            raise LostError("the first message is not `opened`")
        return response.opened

    async def _write(self, request: Any) -> None:
        """Write a request. If the stream is over nothing happens: the next read raises, and tells why."""
        assert self._call is not None  # nothing is sent before `open`
        async with self._writing:
            try:
                await self._call.write(request)
            except STREAM_IS_OVER:
                pass
            except asyncio.CancelledError:
                if _being_cancelled():
                    raise

    async def _read(self) -> Any:
        """Return the next message. Raise LostError if there is none, UnfitError if the pod does not know the call, and
        a ServiceError if the peer refuses."""
        assert self._call is not None
        try:
            with self._watchdog.listening():
                response = await self._call.read()
        except asyncio.CancelledError:
            if self._aborted_by is None or _being_cancelled():
                raise
            raise self._aborted_by from None
        except grpc.aio.AioRpcError as error:
            seen, said = (
                from_rpc(error, self.peer),
                f"{error.code().name}: {cut(error.details() or '', MAX_LOGGED_BYTES)}",
            )
            match seen:
                case PeerLostError() | ProtocolError():  # ProtocolError: a message may have broken on its way
                    gone = error.code() is grpc.StatusCode.UNAVAILABLE
                    raise LostError(said, conclusive=gone) from error
                case NotBuiltError():
                    raise UnfitError(seen) from error
                case DeadlineError() if not self._over:  # a deadline of the peer, or of a proxy
                    raise LostError(said) from error
            log.info("peer_refused", pod=str(self.pod), said=said)
            raise seen from error
        if response is grpc.aio.EOF or response is None:  # None: a message that cannot be read
            raise LostError("the stream ended before the text did")
        return response

    @property
    def _over(self) -> bool:
        """True if the caller's deadline has passed, as far as two machines agree on the time."""
        assert self._call is not None
        left = self._call.time_remaining()
        return left is not None and left < DEADLINE_SLACK_SECONDS

    def _count_heartbeat(self) -> None:
        """Count a heartbeat; LostError if they come faster than any peer sends them. They cost the peer nothing, and
        nothing else bounds them."""
        now = asyncio.get_running_loop().time()
        # Heartbeats of a time in which nobody read the stream come at once.
        since = HEARTBEATS_A_SECOND * (now - self._last_heartbeat)
        self._heartbeats = min(max(MAX_HEARTBEATS, since), self._heartbeats + since) - 1
        self._last_heartbeat = now
        if self._heartbeats < 0:
            raise LostError("it floods us with signs of life")

    def _check(self, identity: model_pb2.ModelIdentity, model: Model) -> None:
        """Raise UnfitError unless the pod has our protocol and tokenizer, LostError if its identity makes no sense."""
        if identity.ByteSize() > MAX_IDENTITY_BYTES or not identity.context_tokens:
            raise LostError(f"its identity has {identity.ByteSize()} bytes and a context of {identity.context_tokens}")
        if identity.protocol_version != PROTOCOL_VERSION:
            raise UnfitError(
                ProtocolError(f"{self.peer}: speaks protocol {identity.protocol_version}, not {PROTOCOL_VERSION}")
            )
        if identity.tokenizer_fingerprint != model.tokenizer_fingerprint:
            raise OtherTokenizerError(
                ProtocolError(
                    f"{self.peer}: serves {identity.model!r} with another tokenizer than {model.name!r} has here"
                )
            )

    def _on_silence(self) -> None:
        self.abort(LostError(f"silent for {self._silence:g} s", conclusive=True))


class VerifierStream(PeerStream):
    """A session at a verifier."""

    peer = "verifier"

    def __init__(self, pod: Pod, timeout: float | None, silence: float, longest_step: Callable[[], float]) -> None:
        """Make a stream that is not open yet. `longest_step` returns the seconds that a step may last in any case."""
        super().__init__(pod, timeout, silence)
        self._longest_step = longest_step
        self.identity = model_pb2.ModelIdentity()
        self.max_nodes = 0
        self.drafting_wanted = False  # when it opened
        self.min_candidate_probability = 0.0  # likewise
        self._checksum = 0  # of what was sent and received
        self._policy = verifier_pb2.VerifyPolicy()  # as it was last sent

    async def open(
        self,
        sample: Sample,
        generated: Sequence[int],
        model: Model,
        policy: verifier_pb2.VerifyPolicy,
        *,
        attempt: int,
        revision: str,
    ) -> None:
        """Open the session; UnfitError if the pod serves something else, such as another `revision` of the model
        (empty: any)."""
        self._policy = policy
        message = verifier_pb2.VerifyOpen(
            prompt_tokens=sample.prompt,
            generated_tokens=generated,
            sampling=sampling_message(sample.sampling),
            rule=rule_message(sample.rule),
            contrast=sample.contrast,
            max_tokens=sample.max_tokens,
            end_tokens=sorted(sample.end_tokens),
            min_tokens=sample.min_tokens,
            top_logprobs=sample.top_logprobs,
            policy=policy,
            tenant=sample.tenant,
            attempt=attempt,
            coalesce_commits=sample.coalesce_commits,
        )
        message.checksum = self._checksum = checksum.of_opening(message)
        stub = verifier_pb2_grpc.VerifierServiceStub(self.pod.channel)
        opened: verifier_pb2.VerifyOpened = await self._begin(stub.Verify, verifier_pb2.VerifyRequest(open=message))
        self.identity, self.max_nodes = opened.identity, max(1, opened.max_nodes)
        self.drafting_wanted = opened.drafting_wanted
        self.min_candidate_probability = opened.min_candidate_probability
        self._check(self.identity, model)
        if self.identity.context_tokens > model.context:
            raise UnfitError(
                ProtocolError(
                    f"verifier: has a context of {self.identity.context_tokens} tokens, {model.name!r} has "
                    f"{model.context} here"
                )
            )
        if not 0 <= self.min_candidate_probability <= 1 or self.max_nodes > MAX_GRANTED_NODES:
            raise LostError(
                f"it grants {self.max_nodes} candidates from a probability of {self.min_candidate_probability} on"
            )
        if revision and self.identity.model_fingerprint != revision:
            raise UnfitError(
                PeerLostError(
                    f"verifier: serves revision {self.identity.model_fingerprint[:16]} of {self.identity.model!r}, the "
                    f"text was begun with {revision[:16]}",
                    "MODEL_CHANGED",
                )
            )
        self.pod.numerics = self.identity.numerics_fingerprint
        self.pod.load.report(opened.capacity if opened.HasField("capacity") else NO_LOAD)
        self.opened = True

    async def commits(self) -> AsyncIterator[verifier_pb2.Commit]:
        """Yield commits until the last one."""
        while True:
            response = await self._read()
            match response.WhichOneof("message"):
                case "commit":
                    self._heard(response.commit)
                    yield response.commit
                    if response.commit.finish_reason:
                        return
                case "heartbeat":
                    self._count_heartbeat()
                    self._look_at(response.heartbeat)
                case _:  # a newer verifier may send what we do not know, now and then
                    self._count_heartbeat()

    def _heard(self, commit: verifier_pb2.Commit) -> None:
        self._checksum = checksum.extended(self._checksum, commit.committed.tokens, commit.finish_reason)
        if commit.checksum != self._checksum:
            raise LostError("what was said on this stream is not what was heard, by the checksum of a commit")

    def _look_at(self, heartbeat: model_pb2.Heartbeat) -> None:
        """Take the capacity from a heartbeat; LostError if the verifier's step is stuck. A worker that steps is alive,
        one that only answers is not. It need not step for this session, which may have to wait for memory, for its
        draft or for its reader."""
        if heartbeat.HasField("capacity"):
            self.pod.load.report(heartbeat.capacity)
        age, expected = heartbeat.step_age_us / 1e6, heartbeat.step_expected_us / 1e6
        if age > STUCK_STEPS * expected and age > self._longest_step():
            raise LostError(f"a step has lasted {age:.1f} s, {expected:.3f} s are usual", conclusive=True)

    async def extend(self, extend: model_pb2.Extend) -> None:
        """Send candidates."""
        await self._write(verifier_pb2.VerifyRequest(extend=extend))

    async def set_policy(self, policy: verifier_pb2.VerifyPolicy) -> None:
        """Have the session speculate by this policy from now on."""
        if policy != self._policy:
            self._policy = policy
            await self._write(verifier_pb2.VerifyRequest(policy=policy))

    async def consumed(self, tokens: int) -> None:
        """Report how far the client has read. Nothing is read from the stream meanwhile, so this must not take long:
        the watchdog counts the time."""
        with self._watchdog.listening():
            await self._write(verifier_pb2.VerifyRequest(consumed=verifier_pb2.Consumed(tokens=tokens)))


NO_LOAD = model_pb2.PodCapacity(room=2**16)
"""Capacity of a pod that does not report any: it will refuse what it cannot take."""


class DraftStream(PeerStream):
    """A session at a draft."""

    peer = "draft"

    def __init__(self, pod: Pod, timeout: float | None, silence: float) -> None:
        super().__init__(pod, timeout, silence)
        self.at_work = False  # it has sent candidates
        self._outgoing: asyncio.Queue[draft_pb2.DraftRequest] = asyncio.Queue()
        self._feeding: asyncio.Task[None] | None = None

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._feeding is not None:
                self._feeding.cancel()
                await asyncio.wait([self._feeding])  # awaiting it directly could not tell its cancellation from ours
        finally:
            await super().__aexit__(kind, error, trace)

    async def open(self, sample: Sample, generated: Sequence[int], model: Model, policy: draft_pb2.DraftPolicy) -> None:
        """Open the session; UnfitError if the pod's protocol or tokenizer is another."""
        message = draft_pb2.DraftOpen(
            prompt_tokens=sample.prompt,
            generated_tokens=generated,
            sampling=sampling_message(sample.sampling),
            rule=rule_message(sample.rule),
            contrast=sample.contrast,
            max_tokens=sample.max_tokens,
            end_tokens=sorted(sample.end_tokens),
            min_tokens=sample.min_tokens,
            policy=policy,
            vocabulary_size=model.vocabulary,
        )
        stub = draft_pb2_grpc.DraftServiceStub(self.pod.channel)
        opened: draft_pb2.DraftOpened = await self._begin(stub.Draft, draft_pb2.DraftRequest(open=message))
        self._check(opened.identity, model)
        self.opened = True
        self._feeding = asyncio.create_task(self._feed())

    async def candidates(self) -> AsyncIterator[model_pb2.Extend]:
        """Yield messages of candidates for as long as the session lives."""
        while True:
            response = await self._read()
            match response.WhichOneof("message"):
                case "extend":
                    self.at_work = True
                    yield response.extend
                case "heartbeat" if response.heartbeat.HasField("capacity"):
                    self._count_heartbeat()
                    self.pod.load.report(response.heartbeat.capacity)
                case _:
                    self._count_heartbeat()

    def send(self, message: draft_pb2.DraftRequest) -> None:
        """Queue a message, so that a draft that does not read stalls nobody."""
        self._outgoing.put_nowait(message)

    async def _feed(self) -> None:
        while True:
            await self._write(await self._outgoing.get())


def _being_cancelled() -> bool:
    """Return True if it is this task that is cancelled, not the stream that it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
