"""`specdec trace`: the recorded timelines of a request, on a common axis."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE

from specdec.cli.trace import TraceTable
from specdec.exit_status import ExitStatus
from specdec.serving.propagation import bind_metadata
from specdec.serving.timeline import Timelines
from specdec.serving.tracing.servicer import TraceServicer
from specdec.v2.trace_pb2 import GetTraceResponse
from tests.stack import served


def told() -> GetTraceResponse:
    """Return the trace of a request that began 3 s ago, lost its verifier after 1 s and continued at another pod."""
    answer = GetTraceResponse()
    request = answer.timelines.add(service="orchestrator", age_us=3_000_000, end_age_us=500_000, error="VERIFIER_LOST")
    request.attributes.update({"steps": 3, "finish_reasons": ["stop", "length"], "time_to_first_token": 0.25})
    request.attributes.update({"speculation": ["off: no permitted drafter is available"]})
    request.events.add(age_us=2_999_000, name="parsed")
    failover = request.events.add(age_us=2_000_000, name="failover")
    failover.attributes.update({"reason": "verifier_lost", "pod": "a:1"})
    session = answer.timelines.add(service="verifier", pod="b:2", age_us=1_900_000, clock_error_us=400)
    session.events.add(age_us=1_899_900, name="queued")
    session.dropped_events = 7
    answer.missing.add(pod="a:1", reason="it does not answer (UNAVAILABLE)")
    answer.missing.add(reason="it does not answer (DEADLINE_EXCEEDED)")
    return answer


def test_lines_are_in_order_of_time() -> None:
    assert list(TraceTable(told()).lines()) == [
        "         0.0 ms  orchestrator  begin",
        "         1.0 ms  orchestrator  parsed",
        "      1000.0 ms  orchestrator  failover pod=a:1 reason=verifier_lost",
        "      1100.0 ms  verifier b:2  begin",
        "      1100.1 ms  verifier b:2  queued",
        "      2500.0 ms  orchestrator  end failed=VERIFIER_LOST finish_reasons=stop,length steps=3 "
        "time_to_first_token=0.25",
        "speculation: off: no permitted drafter is available",
        "running: verifier b:2",
        "left out: 7 events of verifier b:2",
        "accuracy: the times of verifier b:2 may be shifted by 0.4 ms",
        "missing: a:1: it does not answer (UNAVAILABLE)",
        "missing: another worker of the orchestrator: it does not answer (DEADLINE_EXCEEDED)",
    ]


def test_json_has_microseconds_since_the_beginning() -> None:
    shown = json.loads(json.dumps(TraceTable(told()).as_json()))
    request, session = shown["timelines"]
    assert (request["begin_us"], request["end_us"], request["error"]) == (0, 2_500_000, "VERIFIER_LOST")
    assert request["attributes"] == {
        "steps": 3,
        "finish_reasons": ["stop", "length"],
        "speculation": ["off: no permitted drafter is available"],
        "time_to_first_token": 0.25,
    }
    assert isinstance(request["attributes"]["steps"], int)
    assert request["events"][1] == {
        "at_us": 1_000_000,
        "name": "failover",
        "attributes": {"reason": "verifier_lost", "pod": "a:1"},
    }
    assert (session["begin_us"], session["end_us"], session["clock_error_us"]) == (1_100_000, None, 400)
    assert shown["missing"] == [
        {"pod": "a:1", "reason": "it does not answer (UNAVAILABLE)"},
        {"pod": "", "reason": "it does not answer (DEADLINE_EXCEEDED)"},
    ]


def test_a_server_does_not_steer_the_terminal() -> None:
    answer = told()
    answer.timelines[1].pod = "x\x1b[2J\n"
    answer.timelines[1].events[0].name = "\x07"
    answer.missing[0].reason = "\r"
    assert all(line.isprintable() for line in TraceTable(answer).lines())


async def run(*arguments: str) -> tuple[int, str, str]:
    """Return (status, stdout, stderr) of `specdec trace`."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "specdec.cli", "trace", *arguments, stdout=PIPE, stderr=PIPE
    )
    async with asyncio.timeout(60):
        out, errors = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), errors.decode()


class Traced(TraceServicer):
    """A service that serves only traces."""

    async def close(self) -> None:
        pass


async def test_the_command_tells_what_a_service_has_and_names_what_it_has_not(unused_tcp_port: int) -> None:
    timelines = Timelines()
    bind_metadata({"x-request-id": "abc"})
    with timelines.begin("verify") as timeline:
        timeline.event("queued")
    async with served(Traced("verifier", timelines)) as (address, _):
        shown, by_http, as_json, unknown, nowhere = await asyncio.gather(
            run("abc", "--address", address),
            run("chatcmpl-abc", "--address", address),
            run("abc", "--address", address, "--json"),
            run("xyz", "--address", address),
            run("abc", "--address", f"127.0.0.1:{unused_tcp_port}"),
        )
    assert (shown[0], shown[2]) == (0, "")
    assert by_http[1].count("\n") == shown[1].count("\n")
    assert [line.split("ms  ")[1] for line in shown[1].splitlines()] == [
        "verifier  begin",
        "verifier  queued",
        "verifier  end",
    ]
    assert json.loads(as_json[1])["request_id"] == "abc"
    assert (unknown[0], unknown[1]) == (ExitStatus.REFUSED, "")
    assert "request_id: no timeline of 'xyz' here. Each process keeps" in unknown[2]
    assert (nowhere[0], nowhere[2].count("\n")) == (ExitStatus.UNREACHABLE, 1)
