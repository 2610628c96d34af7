"""Session streams: the life of a session as a stream, shared by draft and verifier.

The first request opens the session and allocates its memory. Later requests go to the worker in order, and the worker's
responses go back. When the stream ends, for any reason, the memory is free within a step. Heartbeats never wait for a
step; the answer to `open` waits at most `place_seconds`.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import grpc
import structlog

from specdec.engine.kv.slots import PoolFullError
from specdec.grammar.stacks import ServiceThreads
from specdec.serving.client_sessions import ClientSessions
from specdec.serving.errors import EngineLostError, OverloadedError, ProtocolError
from specdec.serving.interceptor import Gate
from specdec.serving.opening import Openings
from specdec.serving.response_queue import ResponseQueue
from specdec.serving.timeline import Timeline, Timelines
from specdec.serving.validation import MAX_MESSAGE_BYTES
from specdec.serving.worker import Worker
from specdec.v2 import model_pb2

log = structlog.get_logger()

LINGER_SECONDS = 5.0
"""Seconds for a caller to end its stream after the last response."""

OPEN_SECONDS = 10.0
"""Seconds for `open` to arrive after the start of a stream."""

LONG_BYTES = 1 << 14
"""Size in bytes above which an `open` is slow to parse: a long prompt takes a tenth of a second."""

PARSING_THREADS = 4
"""Threads for slow parses, which include following the grammars of resumed texts."""

FULL_SECONDS = 5.0
"""Retry delay in seconds of a pod without memory for a session: each attempt sends a whole text."""

INBOX_REQUESTS = 32
INBOX_BYTES = 1 << 20
"""Limits on one session's requests that wait for its worker; reading resumes once they are handled. An honest session
sends a handful per step; a flood keeps the worker from other sessions for at most 20 ms."""

Request = TypeVar("Request")
Response = TypeVar("Response")
Session = TypeVar("Session")


class SessionServicer(ABC, Generic[Session, Request, Response]):
    """The base of the draft and verifier servicers: subclasses define their sessions, `run` serves them."""

    def __init__(self, worker: Worker, max_sessions: int, max_sessions_per_client: int | None = None) -> None:
        """Serve sessions with a worker: at most `max_sessions` in total and `max_sessions_per_client` per client (None:
        no limit per client)."""
        self._worker = worker
        self._max_sessions = max_sessions
        self._clients = ClientSessions(max_sessions_per_client)
        self._openings = Openings(OPEN_SECONDS)
        self._sessions = 0
        self._parsing: list[str] = []  # tenants of openings being parsed
        self._submitted: deque[str] = deque()  # tenants of parsed sessions, removed as the worker takes them
        self.timelines = Timelines()
        self._parsers = ServiceThreads(PARSING_THREADS, "parse")

    async def close(self) -> None:
        await asyncio.to_thread(self._worker.stop)
        self._parsers.shutdown(wait=False, cancel_futures=True)

    timeline_name = "session"
    """Name of its sessions' timelines."""

    max_request_bytes = MAX_MESSAGE_BYTES
    connection_seconds = None  # orchestrators discover pods themselves

    place_seconds = 0.0
    """Seconds that the answer to `open` waits for the session's memory, so that a session that gets none is refused
    instead of being opened. It is bounded because a step may take longer, and a silent pod would be considered lost."""

    gates: Sequence[Gate] = ()

    needs: Mapping[str, bool] = MappingProxyType({})

    @property
    def works(self) -> bool:
        return self._worker.works

    @property
    def arriving(self) -> list[str]:
        """Tenants of sessions that the worker has not taken yet."""
        return [*self._parsing, *self._submitted.copy()]  # a copy, since the worker's thread may change it

    def tenant_of(self, request: Request) -> str:
        """Return the tenant of an `open`."""
        return ""

    def admit(self, request: Request, deadline: float | None) -> None:
        """Raise OverloadedError at the session limit, EngineLostError if the engine does not work. `deadline` is the
        caller's, in monotonic time. Runs on the event loop, so that a refusal does not wait for a step."""
        if not self.works:
            raise EngineLostError
        if not self.room:
            raise OverloadedError(f"{self._sessions} sessions are open, the limit is {self._max_sessions}")

    @property
    def room(self) -> int:
        """Number of further sessions that would be accepted."""
        return max(0, self._max_sessions - self._sessions)

    def capacity(self) -> model_pb2.PodCapacity:
        """Return the pod's open sessions and room."""
        return model_pb2.PodCapacity(sessions=self._sessions, room=self.room)

    @abstractmethod
    def parse(self, request: Request, deadline: float | None) -> Session:
        """Return the session for an `open`; ServiceError if it is refused. `deadline` is the caller's, in monotonic
        time."""

    def takes_long(self, request: Request) -> bool:
        """Return whether an `open` is slow enough to parse in a thread."""
        return request.ByteSize() > LONG_BYTES  # type: ignore[attr-defined, no-any-return]

    async def prepare(self, request: Request) -> object:
        """Do asynchronous work before a slow `open` is parsed; return an object to keep alive during parsing."""

    @abstractmethod
    def attach(self, session: Session, responses: ResponseQueue[Response], timeline: Timeline) -> None:
        """Allocate a session's memory and start it in the worker, recording events in the timeline; PoolFullError if
        there is no memory. Runs in the worker's thread."""

    @abstractmethod
    def detach(self, session: Session) -> None:
        """Remove a session from the worker and free its memory. Runs in the worker's thread, possibly more than
        once."""

    @abstractmethod
    def act(self, session: Session, request: Request, arrived: float) -> None:
        """Handle a later request. It `arrived` at this `time.monotonic()`. ValueError ends the session. Runs in the
        worker's thread."""

    @abstractmethod
    def opened(self, session: Session) -> Response:
        """Return the answer to `open`."""

    @abstractmethod
    def heartbeat(self, session: Session) -> Response:
        """Return a heartbeat for the stream of a session. Runs on the event loop."""

    @abstractmethod
    def is_last(self, response: Response) -> bool:
        """Return whether this response ends the session."""

    async def run(self, requests: AsyncIterator[Request], context: grpc.aio.ServicerContext[Request, Response]) -> None:
        first = await self._openings.first(requests)
        if first is None or _kind(first) != "open":
            raise ProtocolError("the first message of a session must be `open`")
        left = context.time_remaining()
        deadline = None if left is None else time.monotonic() + left
        self.admit(first, deadline)
        self._sessions += 1
        try:
            with self._clients.session(context), self.timelines.begin(self.timeline_name) as timeline:
                session = await self._parsed(first, deadline)
                self._submitted.append(self.tenant_of(first))
                await self._serve(session, requests, context, timeline)
        finally:
            self._sessions -= 1

    async def _parsed(self, request: Request, deadline: float | None) -> Session:
        if not self.takes_long(request):
            return self.parse(request, deadline)
        tenant = self.tenant_of(request)
        self._parsing.append(tenant)
        try:
            held = await self.prepare(request)
            try:
                return await self._parsers.run(self.parse, request, deadline)
            finally:
                del held
        finally:
            self._parsing.remove(tenant)

    async def _serve(
        self,
        session: Session,
        requests: AsyncIterator[Request],
        context: grpc.aio.ServicerContext[Request, Response],
        timeline: Timeline,
    ) -> None:
        """Serve a parsed session until its stream ends."""
        responses: ResponseQueue[Response] = ResponseQueue()
        taking = asyncio.create_task(self._worker.call(partial(self._take, session, responses, timeline)))
        reader: asyncio.Task[None] | None = None
        try:
            taken, _ = await asyncio.wait({taking}, timeout=self.place_seconds)
            if all(task.result() for task in taken):
                await context.write(self.opened(session))
            reader = asyncio.create_task(self._read(requests, session, responses))
            await responses.write_to(context, heartbeat=partial(self.heartbeat, session), is_last=self.is_last)
            # Let the caller end the stream: it may still be writing, and a write to a closed stream would cost it the
            # last response.
            await asyncio.wait({reader}, timeout=LINGER_SECONDS)
        finally:
            if reader is not None:
                reader.cancel()
            self._worker.submit(partial(self.detach, session))

    def _take(self, session: Session, responses: ResponseQueue[Response], timeline: Timeline) -> bool:
        """Attach a session. If that fails, put the error among its responses and return False. Runs in the worker's
        thread."""
        self._submitted.popleft()
        try:
            self.attach(session, responses, timeline)
        except PoolFullError as full:
            responses.send(OverloadedError(f"the key/value memory is full: {full}", FULL_SECONDS))
        except Exception as error:  # it ends this session, not the worker
            responses.send(error)
        else:
            return True
        return False

    async def _read(
        self, requests: AsyncIterator[Request], session: Session, responses: ResponseQueue[Response]
    ) -> None:
        """Submit requests to the worker, in order, until one ends the session. Reading stops while the inbox is
        full."""
        submitted = submitted_bytes = 0
        done = done_bytes = 0  # handled by the worker; written in its thread
        over = False

        def act(request: Any, arrived: float, size: int) -> None:
            nonlocal done, done_bytes, over
            try:
                if not over:
                    self.act(session, request, arrived)
            except ValueError as error:
                over = True
                responses.send(ProtocolError(f"{_kind(request)}: {error}"))
            except Exception as error:  # it ends this session, not the worker
                over = True
                responses.send(error)
            done, done_bytes = done + 1, done_bytes + size

        try:
            async for request in requests:
                if over:
                    return
                if _kind(request) in ("open", None):
                    responses.send(ProtocolError("a message is empty, or a second `open`"))
                    return
                size = request.ByteSize()  # type: ignore[attr-defined]
                self._worker.submit(partial(act, request, time.monotonic(), size))
                submitted, submitted_bytes = submitted + 1, submitted_bytes + size
                if submitted - done >= INBOX_REQUESTS or submitted_bytes - done_bytes >= INBOX_BYTES:
                    await self._worker.caught_up()
        except Exception as error:  # an unreadable stream ends the session
            log.info("stream_unreadable", error=repr(error))
            responses.send(ProtocolError("the stream cannot be read"))


def _kind(request: Any) -> str | None:
    kind: str | None = request.WhichOneof("message")
    return kind
