"""Pod selection and pod state."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from orchestrator.pods.admission import STALE_SECONDS, PodLoad
from orchestrator.pods.backoff import Backoff
from orchestrator.pods.pods import UNFIT_SECONDS, Pod, Pods
from specdec.v2 import model_pb2


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Wire:
    """The part of a channel that pods use."""

    def __init__(self) -> None:
        self.closed = False

    async def close(self) -> None:
        self.closed = True


def pods(addresses: Iterable[str], clock: Clock | None = None) -> Pods:
    return Pods(addresses, connect=lambda address: Wire(), clock=clock or Clock())  # type: ignore[arg-type, return-value]


def chosen(among: Pods, times: int, **wishes: object) -> list[str]:
    found = [among.choose(**wishes) for _ in range(times)]  # type: ignore[arg-type]
    return [pod.address if pod else "" for pod in found]


def test_equals_take_turns() -> None:
    assert chosen(pods("abc"), 6) == list("abcabc")


def test_the_least_loaded_is_first() -> None:
    three = pods("abc")
    for pod, sessions in zip(three, (5, 2, 9), strict=True):
        pod.load.report(model_pb2.PodCapacity(sessions=sessions))
    assert chosen(three, 2) == ["b", "b"]


def test_what_was_opened_since_counts() -> None:
    two = pods("ab")
    first, second = two
    first.load.report(model_pb2.PodCapacity(sessions=1))
    with second.load.session(), second.load.session():
        assert chosen(two, 1) == ["a"]
    assert chosen(two, 1) == ["b"]


def test_open_breakers_are_left_alone() -> None:
    clock = Clock()
    two = pods("ab", clock)
    first, _ = two
    first.breaker.failed(conclusive=True)
    assert chosen(two, 3) == ["b", "b", "b"]
    assert chosen(two, 1, exclude=set(two)) == [""]
    clock.now += 10
    assert "a" in chosen(two, 2)


def test_who_cannot_afford_a_trial_makes_none() -> None:
    clock = Clock()
    two = pods("ab", clock)
    first, second = two
    first.breaker.failed(conclusive=True)
    second.load.report(model_pb2.PodCapacity(sessions=50))
    clock.now += 0.5  # half-open
    assert chosen(two, 2) == ["a", "a"]
    assert chosen(two, 2, no_trial=True) == ["b", "b"]
    assert chosen(two, 1, no_trial=True, exclude={second}) == ["a"]


def test_who_was_lost_last_comes_last() -> None:
    two = pods("ab")
    first, second = two
    second.load.report(model_pb2.PodCapacity(sessions=50))
    assert chosen(two, 2, avoid=[first]) == ["b", "b"]
    assert chosen(two, 1, avoid=[first], exclude={second}) == ["a"]


def test_equal_numerics_come_first() -> None:
    three = pods("abc")
    for pod, numerics in zip(three, ("x", "y", ""), strict=True):
        pod.numerics = numerics
    assert set(chosen(three, 4, numerics="y")) == {"b", "c"}  # c has not reported yet


def test_whose_memory_holds_the_text_comes_first() -> None:
    """A text that outgrows a pod's memory ends there, or has to move to another pod."""
    three = pods("abc")
    small, large, unknown = three
    small.context_tokens, large.context_tokens = 100, 1000
    assert chosen(three, 2, tokens=500, avoid=(large,)) == ["c", "c"]
    assert chosen(three, 1, tokens=500, avoid=(large, unknown)) == ["a"]
    assert chosen(three, 2, tokens=500, exclude=(unknown,)) == ["b", "b"]
    assert set(chosen(three, 3, tokens=100)) == {"a", "b", "c"}


def test_the_unfit_are_not_asked_before_there_may_be_others_in_their_place() -> None:
    clock = Clock()
    two = pods("ab", clock)
    first, _ = two
    first.found_unfit("tokenizer_mismatch", ValueError("another tokenizer"))
    clock.now += UNFIT_SECONDS - 1
    assert chosen(two, 2) == ["b", "b"]
    assert str(first.unfit) == "another tokenizer"
    clock.now += 1
    assert set(chosen(two, 2)) == {"a", "b"}


async def test_pods_that_stay_keep_what_is_known_of_them() -> None:
    some = pods("ab")
    first, second = some
    some.become("bc")
    assert [pod.address for pod in some] == ["b", "c"]
    assert second in some
    with first.load.session():
        await some.close_idle()
        assert not wire_of(first).closed  # its last session still runs
    await some.close_idle()
    assert wire_of(first).closed
    await some.close()
    assert all(wire_of(pod).closed for pod in some)


def wire_of(pod: Pod) -> Wire:
    assert isinstance(pod.channel, Wire)
    return pod.channel


def test_others_sessions_are_forgotten_when_they_are_old_news() -> None:
    clock = Clock()
    load = PodLoad(clock)
    with load.session():
        load.report(model_pb2.PodCapacity(sessions=7))
        assert load.sessions == 7
    assert load.sessions == 6
    assert load.now == model_pb2.PodCapacity(sessions=6)
    clock.now += 1.1 * STALE_SECONDS
    assert load.reported is None
    assert load.sessions == 0


def test_a_pod_is_shown_without_sessions_that_have_ended() -> None:
    """Its last report may be older than the end of its last session."""
    (pod,) = pods("a", Clock())
    pod.load.opening = 1
    pod.load.report(model_pb2.PodCapacity(sessions=1, room=4))
    pod.load.opening = 0
    with pod.load.session():
        assert pod.load.now == model_pb2.PodCapacity(sessions=1, room=4)
    assert pod.load.now == model_pb2.PodCapacity(sessions=0, room=4)
    assert pod.load.reported == model_pb2.PodCapacity(sessions=1, room=4)


def test_pauses_double_and_come_to_an_end() -> None:
    clock = Clock()
    backoff = Backoff(10.0, longest=2.0, clock=clock, jitter=lambda: 1.0)
    assert not backoff.exhausted
    clock.now += 100  # waiting for memory, for example: not a failure
    backoff.failed()
    pauses = [backoff.pause() for _ in range(8)]
    assert pauses == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0])
    clock.now += 9.9
    backoff.failed()
    assert not backoff.exhausted
    clock.now += 0.2
    assert backoff.exhausted
    backoff.progressed()
    assert not backoff.exhausted
    assert backoff.pause() == pytest.approx(0.05)


def test_failures_that_are_not_repeated_lapse() -> None:
    clock = Clock()
    backoff = Backoff(10.0, lapse=3.0, clock=clock)
    for _ in range(5):
        backoff.failed()
        clock.now += 2.5
    assert backoff.exhausted
    clock.now += 1.0
    assert not backoff.exhausted
    backoff.failed()
    assert not backoff.exhausted


def test_no_two_pauses_are_the_same() -> None:
    pauses = {Backoff(1.0).pause() for _ in range(20)}
    assert len(pauses) > 10
    assert all(0.025 <= pause <= 0.05 for pause in pauses)
