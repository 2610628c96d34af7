"""The orchestrator's side of a session's stream to a verifier or draft service: opening, reading, writing, ending."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import grpc
import structlog

from orchestrator.generation.sample_context import SampleContext
from orchestrator.pods.errors import LostError, UnfitError
from orchestrator.pods.pods import Pod
from specdec.serving.echo import cut
from specdec.serving.errors import DeadlineError, NotBuiltError, PeerLostError, ProtocolError, from_rpc, said_by_pod
from specdec.serving.propagation import carried
from specdec.wire.cancellation import being_cancelled

DEADLINE_SLACK_SECONDS = 0.1
"""A peer's DEADLINE_EXCEEDED within this many seconds of the caller's deadline counts as the caller's: the timers of
the two machines start one network delay apart."""

MAX_LOGGED_BYTES = 1024
"""Maximum bytes logged of a peer's reason for ending a session. The reasons given by our own services fit."""

WAITED_SECONDS = 0.001
"""Minimum duration of a read that had to wait for its message."""

CURRENT_SECONDS = 1.0
"""Maximum seconds since a read last waited for its message, if messages are to show the pod's present state. A text
whose client reads slowly may be a minute behind."""

MAX_OPENED_BYTES = 1 << 14
"""Maximum size of `opened` in bytes. A sub-message of `opened` is kept for the whole session and pins the whole buffer
in memory. Our own services send a few hundred bytes."""

MAX_HEARTBEATS = 64
HEARTBEATS_A_SECOND = 16
"""Token bucket for heartbeats: burst, and rate per second. Our own services send at most a quarter of this rate."""

TICKS = 4
"""Ticks in a watchdog's timeout. Silence is counted in ticks of our own event loop instead of clock time: a stall of
the loop counts as one tick, so the peer is not blamed for it."""

log = structlog.get_logger()

Call = grpc.aio.StreamStreamCall[Any, Any]

STREAM_IS_OVER = (asyncio.InvalidStateError, grpc.aio.UsageError, grpc.aio.AioRpcError)
"""Raised by writes to a stream that has ended."""


class PeerStream:
    """The stream of a session at a pod. Used as a context manager: leaving it ends the session. All streams at a pod
    share one connection: its channel is a `MuxChannel`."""

    peer = "peer"

    def __init__(self, pod: Pod, context: SampleContext, clock: Callable[[], float] | None = None) -> None:
        self.pod = pod
        self._context = context
        self._watchdog = Watchdog(context.peers.silence_seconds, self._on_silence)
        self.opened = False
        self._call: Call | None = None
        self._aborted_by: Exception | None = None
        self._clock = clock or (lambda: time.monotonic())  # looked up at each call: `evaluation` replaces the clock
        self._caught_up = self._clock()  # time at which no message was left to read
        # Heartbeats left in the token bucket after the last heartbeat.
        self._heartbeats, self._last_heartbeat = float(MAX_HEARTBEATS), self._clock()
        self._writing = asyncio.Lock()  # gRPC allows one write at a time; waiters go in order

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watchdog.stop()
        self.abort(LostError("the session was closed"))

    def abort(self, error: Exception) -> None:
        """End the session: reads raise this error, writes do nothing."""
        if self._aborted_by is None:
            self._aborted_by = error
            if self._call is not None:
                self._call.cancel()

    @property
    def is_current(self) -> bool:
        """True if messages are read soon after they arrive. Older ones say nothing about the pod's present state."""
        return self._clock() - self._caught_up <= CURRENT_SECONDS

    async def _begin(self, method: Any, request: Any) -> Any:
        """Start the stream, and return the answer to its first request."""
        self._call = method(timeout=self._context.timeout, metadata=carried())
        self._caught_up = self._clock()  # the session may have waited for admission
        self._watchdog.start()
        with self._watchdog.listening():  # a connection that never comes up counts as silence
            await self._write(request)
        response = await self._read()
        if response.WhichOneof("message") != "opened":
            raise LostError("its first message is not `opened`")
        if (size := response.ByteSize()) > MAX_OPENED_BYTES:
            raise LostError(f"its `opened` has {size} bytes, at most {MAX_OPENED_BYTES} are allowed")
        return response.opened

    async def _write(self, request: Any) -> None:
        """Write a request. Do nothing if the stream is over: the next read raises the reason."""
        assert self._call is not None  # nothing is sent before `open`
        async with self._writing:
            try:
                await self._call.write(request)
            except STREAM_IS_OVER:
                pass
            except asyncio.CancelledError:
                if being_cancelled():
                    raise

    async def _read(self) -> Any:
        """Return the next message. Raise LostError if there is none, UnfitError if the pod does not implement the call,
        and a ServiceError if the peer refuses."""
        assert self._call is not None
        begun = self._clock()
        try:
            with self._watchdog.listening():
                try:
                    response = await self._call.read()
                finally:
                    if self._clock() - begun > WAITED_SECONDS:
                        self._caught_up = self._clock()
        except asyncio.CancelledError:
            if being_cancelled():
                raise
            raise self._aborted_by or LostError("its channel was closed", conclusive=True) from None
        except grpc.aio.AioRpcError as error:
            seen, said = (
                from_rpc(error, self.peer),
                f"{error.code().name}: {cut(error.details() or '', MAX_LOGGED_BYTES)}",
            )
            match seen:
                case PeerLostError() | ProtocolError():  # ProtocolError: a message may have been corrupted in transit
                    gone = error.code() is grpc.StatusCode.UNAVAILABLE
                    died = gone and self._reached and not said_by_pod(error)
                    raise LostError(said, conclusive=gone, died=died) from error
                case NotBuiltError():
                    raise UnfitError(seen) from error
                case DeadlineError() if not self._over:  # a deadline of the peer, or of a proxy
                    raise LostError(said) from error
            log.info("peer_refused", pod=str(self.pod), said=said)
            raise seen from error
        if response is grpc.aio.EOF or response is None:  # None: gRPC could not decode the message
            raise LostError("the stream ended before the text was complete")
        return response

    @property
    def _reached(self) -> bool:
        """True if the pod was up: a failed connection attempt does not count as a pod's death."""
        return self.opened or getattr(self._call, "reached", False)

    @property
    def _over(self) -> bool:
        """True if the caller's deadline has passed, within `DEADLINE_SLACK_SECONDS`."""
        assert self._call is not None
        left = self._call.time_remaining()
        return left is not None and left < DEADLINE_SLACK_SECONDS

    def _count_heartbeat(self) -> None:
        """Count a heartbeat. Raise LostError if the token bucket is empty: heartbeats have no other limit, and sending
        them costs a hostile peer nothing."""
        now = self._clock()
        # A token bucket with one exception: heartbeats that queued up while the stream was not read arrive together, so
        # the credit of that pause (`since`) may exceed the burst.
        since = HEARTBEATS_A_SECOND * (now - self._last_heartbeat)
        self._heartbeats = max(self._heartbeats, since, min(MAX_HEARTBEATS, self._heartbeats + since)) - 1
        self._last_heartbeat = now
        if self._heartbeats < 0:
            raise LostError("it sends too many heartbeats")

    def _on_silence(self) -> None:
        self._caught_up = self._clock()  # the silence is of now, also if a write noticed it
        self.abort(LostError(f"silent for {self._context.peers.silence_seconds:g} s", conclusive=True))


class Watchdog:
    """Calls `on_silence` when a listener has received nothing for `seconds`, or up to a tick longer."""

    def __init__(self, seconds: float, on_silence: Callable[[], None]) -> None:
        self._tick_seconds = seconds / TICKS
        self._on_silence = on_silence
        self._listening = False
        self._ticks = 0  # since listening began
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._tick_seconds, self._tick)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Count silence while the context lasts: it wraps a wait for the peer's next message. Silence at other times
        does not count."""
        self._listening, self._ticks = True, 0
        try:
            yield
        finally:
            self._listening = False

    def _tick(self) -> None:
        self._ticks += self._listening
        if self._ticks > TICKS:
            self._on_silence()
        else:
            self.start()
