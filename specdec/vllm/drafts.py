"""Sessions at draft services, run on an event loop in a separate thread: vLLM's thread does no network I/O."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import grpc
import structlog

from specdec.decoding.sampling import Sampling
from specdec.serving.identity import protocol_mismatch
from specdec.serving.messages import paths_from, sampling_message
from specdec.serving.pods.breaker import Breaker
from specdec.serving.pods.connections import SecureConnections, connect
from specdec.serving.pods.discovery import Discovery
from specdec.serving.pods.replicas import Replicas
from specdec.serving.validation import MAX_DEPTH
from specdec.v2 import draft_pb2, draft_pb2_grpc, model_pb2
from specdec.vllm.settings import VllmDraftSettings
from specdec.vllm.texts import VllmText
from specdec.wire.tls_files import TlsFiles

log = structlog.get_logger()

TICKS = 4
"""Waits of the event loop that count as SILENCE_SECONDS of silence."""

SILENCE_SECONDS = 1.5
"""Seconds without any message, not even a heartbeat, after which a draft is given up."""

UNSENT = 64
"""Maximum unsent messages of a session. With more, the draft has stopped reading and is given up."""

TOLD_AT_ONCE = 64
"""Committed tokens sent to a paused draft in one batch, so that it has little to catch up on when it resumes."""

AGAIN_SECONDS = 0.5
"""Seconds before a text that has lost its draft is offered to a draft again."""

IDLE_SECONDS = 10.0
"""Seconds without a step after which a text's session at its draft ends, since vLLM does not report the end of a
text."""

FULL_SECONDS = 5.0
"""Back-off in seconds from a draft without room for a text; other drafts may have some."""

ROOM = 1024
"""Limit on a text's growth in one session, in tokens: its draft reserves KV memory for all of them in advance."""

MAX_LOGGED_REASONS = 32
"""Maximum number of distinct refusal reasons logged per draft, since some contain numbers specific to the text."""

REFUSED_SECONDS = 60.0
"""Back-off in seconds from a draft with another tokenizer or protocol."""


class Target(NamedTuple):
    """The target's properties that drafts must match, and vLLM's number of candidates."""

    tokenizer_fingerprint: str
    vocabulary: int
    context: int
    end_tokens: frozenset[int]
    depth: int  # candidates per text and step


class UnfitDraftError(Exception):
    """A draft cannot draft for this target; the message is the reason."""


@dataclass
class DraftPod:
    """A draft service."""

    address: str
    channel: grpc.aio.Channel
    breaker: Breaker
    sessions: int = 0
    left_alone_until: float = 0.0
    logged: set[str] = field(default_factory=set)  # logged reasons for refusals

    @property
    def in_use(self) -> bool:
        return bool(self.sessions)


class DraftPods(Replicas[DraftPod]):
    """The draft services. Belongs to the event loop."""

    def __init__(self, tls: TlsFiles | None) -> None:
        self.names: dict[str, str] = {}  # DNS names by address, for which certificates must be valid
        channel = connect if tls is None else SecureConnections(tls, None, self.names)
        super().__init__(lambda address: DraftPod(address, channel(address), Breaker(address)))

    def choose(self) -> DraftPod | None:
        """Return the pod with the fewest sessions among the pods worth trying; None if there is none."""
        now = time.monotonic()
        able = [pod for pod in self if pod.breaker.state != "open" and now >= pod.left_alone_until]
        return min(able, key=lambda pod: pod.sessions, default=None)


@dataclass(eq=False)
class RemoteDraftSession:
    """A text and its current session at a draft, if any."""

    text: VllmText
    outgoing: asyncio.Queue[draft_pb2.DraftRequest] = field(default_factory=asyncio.Queue)
    task: asyncio.Task[None] | None = None
    open: bool = False  # the draft knows the text except for `unsent`
    answered: bool = False  # the draft has accepted the session
    again_at: float = 0.0  # earliest time for the next attempt, in monotonic time
    followed_at: float = 0.0  # time of the text's last step
    paused: bool = False  # the draft proposes nothing
    unsent: list[int] = field(default_factory=list)  # tokens not sent to the draft yet
    end: int = 0  # text length up to which the draft has room


class Drafts:
    """The sessions of all texts, each with room for `room` more tokens. vLLM's thread calls `follow`, `wait` and
    `forget`; `lock` guards the texts."""

    def __init__(self, settings: VllmDraftSettings, target: Target, room: int = ROOM) -> None:
        self._settings = settings
        self._target = target
        self._room = room
        self.lock = threading.Condition()
        self._sessions: dict[VllmText, RemoteDraftSession] = {}
        self._pods = DraftPods(settings.tls)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, name="remote-draft", daemon=True).start()

    def follow(self, text: VllmText, tokens: list[int], *, proposing: bool) -> None:
        """Send a text's draft the tokens that the target has committed, and whether to propose. If `proposing`, find a
        draft for a text without one. The caller holds the lock."""
        session, now = self._sessions.setdefault(text, RemoteDraftSession(text)), time.monotonic()
        session.followed_at = now
        if session.open and self._may_outgrow(session):  # the next session has room again
            session.open = False
            self._soon(self._end, session)
        if session.open:
            session.unsent += tokens
            # `unsent` collects the tokens until the draft has accepted the session.
            if not session.answered:
                return
            if session.paused is proposing:
                session.paused = not proposing
                self._soon(self._send, session, draft_pb2.DraftRequest(policy=self._policy(paused=not proposing)))
            if session.unsent and (proposing or len(session.unsent) >= TOLD_AT_ONCE):
                committed = model_pb2.Committed(base=len(text) - len(session.unsent), tokens=session.unsent)
                session.unsent = []
                self._soon(self._send, session, draft_pb2.DraftRequest(committed=committed))
        elif proposing and session.task is None and now >= session.again_at:
            session.again_at = now + AGAIN_SECONDS
            self._soon(self._begin, session)

    def wait(self, texts: Iterable[VllmText]) -> None:
        """Wait until every text that is worth a wait has candidates, for at most the configured wait of a step. The
        caller holds the lock."""

        def missing() -> list[VllmText]:
            return [text for text in texts if self._sessions[text].open and text.worth_a_wait]

        if missing() and not self.lock.wait_for(lambda: not missing(), self._settings.wait):
            for text in missing():
                text.waited_in_vain()

    def forget(self, texts: Iterable[VllmText]) -> None:
        """End the sessions of texts that have ended."""
        for text in texts:
            session = self._sessions.pop(text, None)
            if session is not None:
                self._soon(self._end, session)

    # --- in the thread of the event loop ------------------------------------------------------------

    def _soon(self, call: Any, *arguments: Any) -> None:
        self._loop.call_soon_threadsafe(call, *arguments)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.call_later(IDLE_SECONDS / 2, self._end_idle)
        logged = ""
        while True:
            try:
                self._loop.run_until_complete(self._find_pods())
                break
            except Exception as error:  # for example while certificates are being replaced
                if logged != str(error):
                    logged = str(error)
                    log.error("drafts_not_found", why=logged)
                time.sleep(AGAIN_SECONDS)
        self._loop.run_forever()

    async def _find_pods(self) -> None:
        self._discovery = Discovery(self._settings.drafts, self._pods, names=self._pods.names)
        await self._discovery.start()

    def _end_idle(self) -> None:
        """End the sessions of texts without a step for IDLE_SECONDS."""
        self._loop.call_later(IDLE_SECONDS / 2, self._end_idle)
        with self.lock:
            sessions = list(self._sessions.values())
        for session in sessions:
            if time.monotonic() - session.followed_at > IDLE_SECONDS:
                self._end(session)

    def _send(self, session: RemoteDraftSession, message: draft_pb2.DraftRequest) -> None:
        if not session.open:
            return
        session.outgoing.put_nowait(message)
        if session.outgoing.qsize() > UNSENT:
            self._end(session)

    def _begin(self, session: RemoteDraftSession) -> None:
        if session.task is None:
            session.task = self._loop.create_task(self._serve(session))

    def _end(self, session: RemoteDraftSession) -> None:
        if session.task is not None:
            session.task.cancel()

    async def _serve(self, session: RemoteDraftSession) -> None:
        """Run a session for a text, if there is a pod, until the draft or the text ends."""
        pod = self._pods.choose()
        try:
            if pod is not None:
                pod.breaker.attempt()
                pod.sessions += 1
                try:
                    await self._draft(session, pod)
                finally:
                    pod.sessions -= 1
        except UnfitDraftError as error:
            assert pod is not None
            pod.breaker.answered()
            pod.left_alone_until = time.monotonic() + REFUSED_SECONDS
            self._tell(pod, str(error))
        except ValueError as error:  # the text does not fit into a message
            log.debug("text_not_drafted", why=str(error))
            session.again_at = math.inf
        except (grpc.aio.AioRpcError, TimeoutError) as error:
            assert pod is not None
            self._failed(session, pod, error)
        finally:
            with self.lock:
                session.open = session.answered = session.paused = False
                session.outgoing, session.unsent, session.task = asyncio.Queue(), [], None
                session.text.lost()
                self.lock.notify_all()

    def _failed(self, session: RemoteDraftSession, pod: DraftPod, error: grpc.aio.AioRpcError | TimeoutError) -> None:
        """Update the pod's back-off and breaker after an error or timeout of its session. A text that the draft rejects
        is not offered again."""
        if isinstance(error, TimeoutError):
            self._tell(pod, f"sent nothing for {SILENCE_SECONDS} seconds")
            pod.breaker.failed(conclusive=True)
            return
        code = error.code()
        details, *_ = (error.details() or "").partition(" (request ")  # without the request id, which always differs
        self._tell(pod, f"{code.name}: {details}")
        if code is grpc.StatusCode.INVALID_ARGUMENT:  # for example longer than the draft accepts
            pod.breaker.answered()
            session.again_at = math.inf
        elif code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            pod.breaker.answered()
            pod.left_alone_until = time.monotonic() + FULL_SECONDS
        else:
            pod.breaker.failed(conclusive=code is grpc.StatusCode.UNAVAILABLE)

    def _tell(self, pod: DraftPod, why: str) -> None:
        """Log a draft's refusal, once per reason."""
        if why not in pod.logged and len(pod.logged) < MAX_LOGGED_REASONS:
            pod.logged.add(why)
            log.warning("draft_refused", pod=pod.address, why=why)

    async def _draft(self, session: RemoteDraftSession, pod: DraftPod) -> None:
        stub: Any = draft_pb2_grpc.DraftServiceStub(pod.channel)
        stream = stub.Draft()
        sending: asyncio.Task[None] | None = None
        try:
            with self.lock:  # tokens committed from now on are sent later
                opening = self._opening(session.text)
                session.open, session.end = True, len(session.text) + opening.max_tokens
            with contextlib.suppress(asyncio.InvalidStateError):  # the stream has ended; the reader gets the error
                await stream.write(draft_pb2.DraftRequest(open=opening))
            opened = await self._read(stream)
            self._check(opened.opened)
            pod.breaker.succeeded()
            sending = self._loop.create_task(self._feed(session, stream))
            with self.lock:
                session.answered = True
            while True:
                response = await self._read(stream)
                if response.WhichOneof("message") == "extend":
                    self._insert(session.text, response.extend)
        finally:
            if sending is not None:
                sending.cancel()
            stream.cancel()

    async def _feed(self, session: RemoteDraftSession, stream: Any) -> None:
        outgoing = session.outgoing
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the reader gets the error
            while True:
                await stream.write(await outgoing.get())

    async def _read(self, stream: Any) -> draft_pb2.DraftResponse:
        """Return the next message; TimeoutError after SILENCE_SECONDS of silence. These are counted in ticks of the
        event loop: if the loop was late itself, as while vLLM holds the GIL, what has arrived is read first."""
        reading = asyncio.ensure_future(stream.read())
        try:
            for _ in range(TICKS):
                if (await asyncio.wait({reading}, timeout=SILENCE_SECONDS / TICKS))[0]:
                    break
            else:
                raise TimeoutError
            response = reading.result()
        finally:
            reading.cancel()
        if not isinstance(response, draft_pb2.DraftResponse):  # ended without an error, a protocol violation
            none = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNKNOWN, none, none, "the draft ended the session")
        return response

    def _insert(self, text: VllmText, extend: model_pb2.Extend) -> None:
        """Add a draft's candidates. Invalid ones are dropped, which loses only a guess."""
        with self.lock:
            try:
                text.insert(extend.base, paths_from(extend))
            except ValueError as error:
                log.debug("candidates_refused", why=str(error))
            self.lock.notify_all()

    def _check(self, opened: draft_pb2.DraftOpened) -> None:
        """Raise UnfitDraftError unless the draft fits this target."""
        identity = opened.identity
        if opened.HasField("features"):
            raise UnfitDraftError(f"serves heads, {identity.model!r}, which need a verifier of specdec")
        if (mismatch := protocol_mismatch(identity)) is not None:
            raise UnfitDraftError(mismatch)
        if identity.tokenizer_fingerprint != self._target.tokenizer_fingerprint:
            raise UnfitDraftError(f"serves {identity.model!r} with a different tokenizer than the target's")

    def _opening(self, text: VllmText) -> draft_pb2.DraftOpen:
        """Return the message that opens a session. It requests greedy candidates, two steps of vLLM ahead, but at most
        MAX_DEPTH deep."""
        target = self._target
        return draft_pb2.DraftOpen(
            prompt_tokens=text.tree.committed,
            sampling=sampling_message(Sampling()),
            max_tokens=max(1, min(target.context - len(text), self._room)),
            end_tokens=sorted(target.end_tokens),
            vocabulary_size=target.vocabulary,
            policy=self._policy(paused=False),
        )

    def _may_outgrow(self, session: RemoteDraftSession) -> bool:
        """Return whether the next step may exceed the draft's room; False at the end of the context, where the text
        ends as well."""
        return session.end < self._target.context and len(session.text) + self._target.depth >= session.end

    def _policy(self, *, paused: bool) -> draft_pb2.DraftPolicy:
        depth = self._target.depth
        return draft_pb2.DraftPolicy(max_nodes=8 * depth, max_depth=min(2 * depth + 1, MAX_DEPTH), paused=paused)
