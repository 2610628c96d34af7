"""Timelines: what happens to a request or a session in this service, as a few events with their times.

A timeline has two readers: `TraceService`, which tells it to whoever knows the request's id, and an exporter, which
makes an OpenTelemetry span of it. Nothing is recorded for each token, and no text and no token ever.
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
"""Timelines that a process keeps of what has ended, the latest ones. Those of what runs come besides."""

FIRST_EVENTS, LAST_EVENTS = 48, 16
"""Events that a timeline keeps: how it began, and how it stands. So many take 26 KB; a usual request has ten."""

VALUE_CHARACTERS = 128

Value = str | int | float | list[str]


class Event(NamedTuple):
    """Something that happened."""

    at: float  # time.monotonic
    name: str
    attributes: dict[str, Value]


class Timeline:
    """What happens to one request or session. One thread adds figures, any thread may add events."""

    def __init__(self, name: str = "", request_id: str = "", trace_id: str = "") -> None:
        self.name = name
        self.request_id = request_id
        self.trace_id = trace_id
        self.began = time.monotonic()
        self.ended: float | None = None
        self.error = ""  # the reason of a ServiceError
        self.attributes: dict[str, Value] = {}
        self.events: list[Event] = []
        self.dropped_events = 0

    def event(self, name: str, **attributes: Value) -> None:
        """Record that something happens now, unless it has ended: a worker may yet end a step of it. If there are too
        many events, one in the middle is dropped."""
        if self.ended is not None:
            return
        self.events.append(Event(time.monotonic(), name, {key: _cut(each) for key, each in attributes.items()}))
        if len(self.events) > FIRST_EVENTS + LAST_EVENTS:
            del self.events[FIRST_EVENTS]
            self.dropped_events += 1

    def first(self, name: str, **attributes: Value) -> None:
        """Record an event unless there is one of this name."""
        if not self.has(name):
            self.event(name, **attributes)

    def has(self, name: str) -> bool:
        return any(each.name == name for each in self.events)

    def set(self, **attributes: Value) -> None:
        """Set figures of the whole."""
        self.attributes |= {key: _cut(each) for key, each in attributes.items()}

    def add(self, **amounts: int) -> None:
        """Add to figures of the whole."""
        for key, amount in amounts.items():
            before = self.attributes.get(key, 0)
            assert isinstance(before, int)
            self.attributes[key] = before + amount


class Span(Protocol):
    """What an exporter makes of a timeline that has begun."""

    def end(self, timeline: Timeline) -> None:
        """Take what has been recorded, and end."""


class Exporter(Protocol):
    """Makes spans of timelines."""

    def begin(self, timeline: Timeline) -> Span:
        """Begin the span of a timeline, in the trace of the call being served, and bind its trace context: calls made
        on behalf of this one belong below it."""


class Timelines:
    """Records the requests or sessions of a service. Only its event loop begins and finds timelines."""

    def __init__(self, kept: int = KEPT) -> None:
        self.exporter: Exporter | None = None
        self._running: dict[Timeline, None] = {}
        self._ended: deque[Timeline] = deque(maxlen=kept)

    @contextmanager
    def begin(self, name: str, **attributes: Value) -> Iterator[Timeline]:
        """Record what the call being served does, until the context is left; an exception is how it failed."""
        timeline = Timeline(name, bound_request_id(), trace_id_of(bound_trace_context()))
        timeline.set(**attributes)
        span = None
        if self.exporter is not None:
            span = self.exporter.begin(timeline)
            timeline.trace_id = trace_id_of(bound_trace_context())
        self._running[timeline] = None
        try:
            yield timeline
        except asyncio.CancelledError:  # how a session at a pod usually ends, once its text is complete
            if not timeline.has("finish"):
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
        """Return the timelines of a request, in order of their beginnings."""
        found = [each for each in (*self._ended, *self._running) if each.request_id == request_id]
        return sorted(found, key=lambda each: each.began)


def _cut(value: Value) -> Value:
    return value[:VALUE_CHARACTERS] if isinstance(value, str) else value
