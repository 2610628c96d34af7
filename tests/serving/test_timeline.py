"""Timelines: what is recorded of a request, for how long, and what an exporter receives."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import structlog

from specdec.serving.errors import OverloadedError
from specdec.serving.propagation import bind_metadata, bind_trace_context, bound_trace_context
from specdec.serving.timeline import FIRST_EVENTS, LAST_EVENTS, VALUE_CHARACTERS, Timeline, Timelines

PARENT = f"00-{16 * 'ab'}-{8 * 'cd'}-01"
CHILD = f"00-{16 * 'ab'}-{8 * 'ef'}-01"


@pytest.fixture(autouse=True)
def _unbound() -> Iterator[None]:
    """Unbind context variables after each test."""
    yield
    structlog.contextvars.clear_contextvars()
    bind_trace_context(())


def ends(timelines: Timelines, error: BaseException, *events: str, texts: int = 1) -> None:
    """End a call of some texts with `error` after these events."""

    def call() -> None:
        with timelines.begin("generate", model="m") as timeline:
            timeline.texts = texts
            for event in events:
                timeline.event(event)
            raise error

    with pytest.raises(type(error)):
        call()


def names(timeline: Timeline) -> list[str]:
    return [event.name for event in timeline.events]


def test_a_long_story_keeps_its_beginning_and_its_end() -> None:
    timeline = Timeline()
    count = FIRST_EVENTS + LAST_EVENTS + 10
    for number in range(count):
        timeline.event(str(number))
    kept = [*range(FIRST_EVENTS), *range(count - LAST_EVENTS, count)]
    assert names(timeline) == list(map(str, kept))
    assert timeline.dropped_events == 10
    assert [event.at for event in timeline.events] == sorted(event.at for event in timeline.events)


def test_nothing_happens_after_the_end() -> None:
    with Timelines().begin("verify") as timeline:
        timeline.event("queued")
    timeline.event("prompt_computed")
    assert names(timeline) == ["queued"]


def test_a_long_value_is_cut() -> None:
    timeline = Timeline()
    timeline.event("a", pod="x" * 1000)
    timeline.set(model="y" * 1000)
    assert (timeline.events[0].attributes, timeline.attributes) == (
        {"pod": "x" * VALUE_CHARACTERS},
        {"model": "y" * VALUE_CHARACTERS},
    )


def test_figures_add_up() -> None:
    timeline = Timeline()
    timeline.add(steps=2, offered=3)
    timeline.add(steps=1)
    assert timeline.attributes == {"steps": 3, "offered": 3}


def test_what_runs_is_kept_besides_the_last_that_ended() -> None:
    timelines = Timelines(kept=2)
    bind_metadata({"x-request-id": "long"})
    with timelines.begin("generate") as running:
        for name in ("a", "b", "c", "b"):
            bind_metadata({"x-request-id": name})
            with timelines.begin("generate"):
                pass
        assert timelines.find("long") == [running]
        assert [len(timelines.find(name)) for name in "abc"] == [0, 1, 1]
        assert running.ended is None
    assert [len(timelines.find(name)) for name in ("long", "b", "c")] == [1, 1, 0]
    assert running.ended is not None
    assert timelines.find("never") == []


def test_an_error_is_told_by_its_reason_alone() -> None:
    timelines = Timelines()
    bind_metadata({"x-request-id": "r"})
    ends(timelines, OverloadedError("the words of somebody's prompt"))
    ends(timelines, KeyError("the words of somebody's prompt"))
    assert [(each.error, each.events) for each in timelines.find("r")] == [("OVERLOADED", []), ("INTERNAL", [])]


def test_a_caller_that_leaves_before_the_end_is_told() -> None:
    timelines = Timelines()
    bind_metadata({"x-request-id": "r"})
    ends(timelines, asyncio.CancelledError())
    ends(timelines, asyncio.CancelledError(), "finish")
    assert [(each.error, names(each)) for each in timelines.find("r")] == [("", ["closed_by_caller"]), ("", ["finish"])]


def test_a_caller_that_leaves_before_the_end_of_every_text_is_told() -> None:
    timelines = Timelines()
    bind_metadata({"x-request-id": "r"})
    ends(timelines, asyncio.CancelledError(), "finish", texts=2)
    ends(timelines, asyncio.CancelledError(), "finish", "finish", texts=2)
    assert [names(timeline)[1:] for timeline in timelines.find("r")] == [["closed_by_caller"], ["finish"]]


class Spans:
    """An exporter that gives all spans the same trace context, within the caller's trace."""

    def __init__(self) -> None:
        self.parents: list[object] = []
        self.bound: list[object] = []  # trace contexts at the ends of calls
        self.ended: list[Timeline] = []

    def begin(self, timeline: Timeline) -> Spans:
        self.parents.append(bound_trace_context())
        bind_trace_context((("traceparent", CHILD),))
        return self

    def end(self, timeline: Timeline) -> None:
        assert timeline.ended is not None
        self.bound.append(bound_trace_context())
        self.ended.append(timeline)


def test_an_exporter_gets_the_whole_timeline_and_binds_its_own_context() -> None:
    timelines = Timelines()
    timelines.exporter = spans = Spans()
    bind_metadata({"traceparent": PARENT})
    ends(timelines, ValueError("no"), "parsed")
    assert (spans.parents, spans.bound) == ([(("traceparent", PARENT),)], [(("traceparent", CHILD),)])
    (timeline,) = spans.ended
    assert (timeline.trace_id, timeline.error, timeline.attributes) == (16 * "ab", "INTERNAL", {"model": "m"})
    assert names(timeline) == ["parsed"]
