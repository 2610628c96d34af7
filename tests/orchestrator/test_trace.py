"""An orchestrator's TraceService returns its own part of a request and the parts of pods. Over real sockets."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from orchestrator.pods.peers import Peers
from orchestrator.pods.pods import Pods
from orchestrator.trace import MAX_AGE_US, MAX_PART_BYTES, OrchestratorTraceServicer
from orchestrator.workers import Siblings
from specdec.serving.propagation import bind_metadata
from specdec.serving.timeline import Timelines
from specdec.serving.tracing.servicer import TraceServicer
from specdec.v2 import trace_pb2, trace_pb2_grpc
from tests.captured_logs import captured_logs
from tests.stack import served

SECOND = 1_000_000


class Telling(TraceServicer):
    """A pod that answers after `seconds`, with one timeline of these `ages` and of an event of this `name`. It asks no
    other process."""

    def __init__(self, *, ages: tuple[int, int] | None = None, seconds: float = 0.0, name: str = "queued") -> None:
        super().__init__("verifier", Timelines())
        self.asked: list[str] = []
        self._ages = ages
        self._seconds = seconds
        self._name = name

    async def close(self) -> None:
        pass

    async def GetTrace(self, request: trace_pb2.GetTraceRequest, context: Any) -> trace_pb2.GetTraceResponse:
        self.asked.append(request.request_id)
        await asyncio.sleep(self._seconds)
        if self._ages is None:
            return await super().GetTrace(request, context)
        begin, event = self._ages
        timeline = trace_pb2.Timeline(service="verifier", age_us=begin, end_age_us=event)
        timeline.events.add(age_us=event, name=self._name)
        return trace_pb2.GetTraceResponse(timelines=[timeline])


class Orchestrator(OrchestratorTraceServicer):
    async def close(self) -> None:
        pass


async def trace(*pods: Telling, others: tuple[str, ...] = (), asked: str = "r") -> trace_pb2.GetTraceResponse:
    """Return an orchestrator's trace of request `r`, which used these pods and pods at other addresses."""
    async with AsyncExitStack() as exits:
        addresses = [(await exits.enter_async_context(served(pod)))[0] for pod in pods]
        peers = Peers(Pods([*addresses, *others[:1]], connect=grpc.aio.insecure_channel))
        timelines = Timelines()
        bind_metadata({"x-request-id": "r"})
        with timelines.begin("generate") as timeline:
            for address in (*addresses, *others):
                timeline.event("verifier_opened", pod=address)
                timeline.event("failover", reason="verifier_lost", pod=address)
        address, _ = await exits.enter_async_context(served(Orchestrator(timelines, lambda: peers.verifiers)))
        channel = await exits.enter_async_context(grpc.aio.insecure_channel(address))
        stub: Any = trace_pb2_grpc.TraceServiceStub(channel)
        try:
            answer: trace_pb2.GetTraceResponse = await stub.GetTrace(trace_pb2.GetTraceRequest(request_id=asked))
        finally:
            await peers.close()
        return answer


async def test_every_pod_is_asked_once_and_its_ages_are_those_of_the_answer() -> None:
    """The slower pod measured its ages before the faster one answered; they are advanced by the time since."""
    quick, slow = Telling(ages=(5 * SECOND, 4 * SECOND)), Telling(ages=(5 * SECOND, 4 * SECOND), seconds=0.4)
    told = await trace(quick, slow)
    assert (quick.asked, slow.asked) == (["r"], ["r"])
    own, of_quick, of_slow = told.timelines
    assert (own.service, own.pod, own.clock_error_us) == ("orchestrator", "", 0)
    assert [event.name for event in own.events] == 2 * ["verifier_opened", "failover"]
    assert of_quick.pod
    assert of_slow.pod != of_quick.pod
    for part in (of_quick, of_slow):
        # A pod may have read its clock at any moment of its answer: the reported error covers that.
        assert part.age_us >= 5 * SECOND
        assert part.age_us - part.end_age_us == SECOND
        assert part.events[0].age_us == part.end_age_us
    assert of_slow.clock_error_us >= 0.2 * SECOND
    assert of_quick.age_us >= 5.4 * SECOND - of_quick.clock_error_us


async def test_parts_that_are_missing_are_told_with_the_reason(unused_tcp_port: int) -> None:
    nowhere = f"127.0.0.1:{unused_tcp_port}"
    told = await trace(Telling(), others=(nowhere, "gone:1"))
    reasons = {each.pod: each.reason for each in told.missing}
    assert reasons[nowhere] == "it does not answer (UNAVAILABLE)"
    assert reasons["gone:1"] == "its address is no longer known"
    (started_anew,) = set(reasons) - {nowhere, "gone:1"}
    assert reasons[started_anew].startswith("it has no timeline of this request")
    assert len(told.timelines) == 1


async def test_a_pod_may_say_anything() -> None:
    told = await trace(Telling(ages=(2**64 - 1, 2**64 - 1)))
    assert told.timelines[1].age_us == MAX_AGE_US


async def test_a_part_that_is_too_long_is_left_out() -> None:
    told = await trace(Telling(ages=(5, 4), name="x" * MAX_PART_BYTES))
    (missing,) = told.missing
    assert missing.reason.endswith(f"at most {MAX_PART_BYTES} are allowed")
    assert [each.service for each in told.timelines] == ["orchestrator"]


async def test_whichever_worker_is_asked_tells_what_all_have_recorded(tmp_path: Path) -> None:
    """A request resumed at another worker has a part at each. Of two further workers, one has died and one has no
    part."""
    pod = Telling()
    async with AsyncExitStack() as exits:
        verifier, _ = await exits.enter_async_context(served(pod))
        peers = Peers(Pods([verifier], connect=grpc.aio.insecure_channel))
        addresses = []
        for number in range(3):
            siblings, timelines = Siblings(tmp_path / str(number)), Timelines()
            if number < 2:
                bind_metadata({"x-request-id": "r"})
                with timelines.begin(f"part {number}") as timeline:
                    timeline.event("verifier_opened", pod=verifier, part=number)
            await siblings.start(TraceServicer("orchestrator", timelines))
            exits.push_async_callback(siblings.close)
            own = Orchestrator(timelines, lambda: peers.verifiers, siblings)
            addresses.append((await exits.enter_async_context(served(own)))[0])
        dead = Siblings(tmp_path / "3")
        await dead.start(TraceServicer("orchestrator", Timelines()))
        await dead.close()
        (tmp_path / "3").touch()
        for count, address in enumerate(addresses, 1):
            async with grpc.aio.insecure_channel(address) as channel:
                stub: Any = trace_pb2_grpc.TraceServiceStub(channel)
                told = await stub.GetTrace(trace_pb2.GetTraceRequest(request_id="r"))
                with pytest.raises(
                    grpc.aio.AioRpcError, match=r"no timeline of 'other' here.*; workers that do not answer: 1"
                ):
                    await stub.GetTrace(trace_pb2.GetTraceRequest(request_id="other"))
            assert {each.events[0].attributes["part"] for each in told.timelines} == {0, 1}
            assert [each.pod for each in told.timelines] == ["", ""]
            assert [(each.pod, each.reason[:17]) for each in told.missing] == [
                ("", "it does not answe"),  # the dead worker
                (verifier, "it has no timelin"),  # asked once, for both
            ]
            assert pod.asked == count * ["r"]
        await peers.close()


async def test_without_a_socket_a_worker_serves_all_the_same(tmp_path: Path) -> None:
    siblings = Siblings(tmp_path / "x" / "1")
    with captured_logs() as logs:
        await siblings.start(TraceServicer("orchestrator", Timelines()))
    assert [line["event"] for line in logs] == ["siblings_not_answered"]
    assert siblings.channels() == []
    await siblings.close()


async def test_an_unknown_request_is_named_with_the_reason_why_it_may_be_gone() -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await trace(asked="other")
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    assert "'other' here. Each process keeps running requests and the last 256" in str(refused.value.details())
