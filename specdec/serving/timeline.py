"""Timelines: a few timestamped events for each request or session of this service.

A timeline has two readers: `TraceService` returns it by request id, and an exporter turns it into an OpenTelemetry
span. Nothing is recorded per token, and no text or token is ever recorded.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from specdec.serving.errors import as_service_error
from specdec.serving.propagation import bound_request_id, bound_trace_context, trace_id_of

KEPT = 256
"""Number of ended timelines kept in a process, besides those of running requests."""

FIRST_EVENTS, LAST_EVENTS = 48, 16
"""Events kept in a timeline: its first and its latest ones. A full timeline takes 26 KB; a usual request has ten
events."""

VALUE_CHARACTERS = 128

Value = str | int | float | list[str]


class Event(NamedTuple):
    """A timestamped event."""

    at: float  # time.monotonic
    name: str
    attributes: dict[str, Value]


class Timeline:
    """The events and attributes of one request or session. One thread sets attributes; any thread may add events."""

    def __init__(self, name: str = "", request_id: str = "", trace_id: str = "") -> None:
        self.name = name
        self.request_id = request_id
        self.trace_id = trace_id
        self.began = time.monotonic()
        self.ended: float | None = None
        self.error = ""  # reason of the ServiceError; "" without one
        self.attributes: dict[str, Value] = {}
        self.texts = 1
        """Number of texts of the request or session, each with an event `finish` at its end."""
        self.finished = 0
        """Number of these events, including a dropped one."""
        self.events: list[Event] = []
        self.dropped_events = 0

    def event(self, name: str, **attributes: Value) -> None:
        """Record an event now. It is ignored after the timeline's end: a worker may still be finishing a step. Above
        the limit, an event in the middle is dropped."""
        if self.ended is not None:
            return
        self.finished += name == "finish"
        self.events.append(Event(time.monotonic(), name, {key: _cut(value) for key, value in attributes.items()}))
        if len(self.events) > FIRST_EVENTS + LAST_EVENTS:
            del self.events[FIRST_EVENTS]
            self.dropped_events += 1

    def first(self, name: str, **attributes: Value) -> None:
        """Record an event unless one of this name exists."""
        if not self.has(name):
            self.event(name, **attributes)

    def has(self, name: str) -> bool:
        return any(event.name == name for event in self.events)

    def set(self, **attributes: Value) -> None:
        self.attributes |= {key: _cut(value) for key, value in attributes.items()}

    def add(self, **amounts: int) -> None:
        """Add to integer attributes of the timeline."""
        for key, amount in amounts.items():
            before = self.attributes.get(key, 0)
            assert isinstance(before, int)
            self.attributes[key] = before + amount


class Span(Protocol):
    """An exporter's span of a timeline."""

    def end(self, timeline: Timeline) -> None:
        """Export the ended timeline's record and end the span."""


class Exporter(Protocol):
    """Turns timelines into spans."""

    def begin(self, timeline: Timeline) -> Span:
        """Begin a timeline's span in the trace of the call being served, and bind the span's trace context, so that
        calls made on behalf of that call become the span's children."""


class Timelines:
    """Records the requests or sessions of a service. `begin` and `find` are for its event loop only."""

    def __init__(self, kept: int = KEPT) -> None:
        self.exporter: Exporter | None = None
        self._running: dict[Timeline, None] = {}
        self._ended: deque[Timeline] = deque(maxlen=kept)

    @contextmanager
    def begin(self, name: str, **attributes: Value) -> Iterator[Timeline]:
        """Record the call being served until the context exits; an exception is recorded as its error."""
        timeline = Timeline(name, bound_request_id(), trace_id_of(bound_trace_context()))
        timeline.set(**attributes)
        span = None
        if self.exporter is not None:
            span = self.exporter.begin(timeline)
            timeline.trace_id = trace_id_of(bound_trace_context())
        self._running[timeline] = None
        try:
            yield timeline
        except asyncio.CancelledError:  # the usual end of a session at a pod, after its text is complete
            if timeline.finished < timeline.texts:
                timeline.event("closed_by_caller")
            raise
        except Exception as error:
            timeline.error = as_service_error(error).reason
            raise
        finally:
            timeline.ended = time.monotonic()
            del self._running[timeline]
            self._ended.append(timeline)
            if span is not None:
                span.end(timeline)

    def find(self, request_id: str) -> list[Timeline]:
        """Return the timelines of a request, oldest first."""
        found = [timeline for timeline in (*self._ended, *self._running) if timeline.request_id == request_id]
        return sorted(found, key=lambda timeline: timeline.began)


def _cut(value: Value) -> Value:
    return value[:VALUE_CHARACTERS] if isinstance(value, str) else value
