"""Loads on fake deployments over real sockets: counts, errors, and the report after Ctrl-C."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc.code_pb2 import RESOURCE_EXHAUSTED
from google.rpc.error_details_pb2 import RetryInfo

from bench.report import Report
from bench.serving.answers import Answer, at_poisson_times
from bench.serving.deployments import DeploymentError
from bench.serving.load_report import report_of, table
from bench.serving.serve import Load, about, main, measure, parsed
from tests.client.fake_server import TOKENS, Act, FakeServer, rich
from tests.openai_api.front import front

FULL = rich(RESOURCE_EXHAUSTED, RetryInfo(retry_delay=Duration(seconds=3)))


async def load(*given: str) -> Report:
    """Run a load and return its report."""
    args = parsed(given)
    report, made = about(args), Load.of(args)
    await measure(args.connect, made, report)
    return report | made.report(args.goodput)


@asynccontextmanager
async def deployment(by: str, *acts: Act) -> AsyncIterator[tuple[str, FakeServer]]:
    """Yield the address of a fake orchestrator, or of the HTTP server in front of it."""
    async with FakeServer(*acts) as server:
        if by == "gRPC":
            yield server.address, server
            return
        async with front(server.address) as http:
            yield f"http://{http.address}", server


@pytest.mark.parametrize("by", ["gRPC", "HTTP"])
async def test_all_tokens_are_counted(by: str) -> None:
    async with deployment(by) as (address, server):
        report = await load(address, "--requests", "5", "--concurrency", "2", "--max-tokens", "99", "--ignore-end")
    assert len(server.calls) == 6  # one to warm up
    requests = [call.request for call in server.calls]
    assert {request.max_tokens for request in requests} == {99}
    assert all(request.ignore_end_token and request.sampling.temperature == 0 for request in requests)
    assert len({request.text for request in requests}) == 6
    assert {len(request.text) for request in requests} == {256}
    assert (report["complete"], report["requests"], report["errors"]) == (5, 5, {})
    assert report["tokens"] == 5 * len(TOKENS)
    assert not report["tokens_are_pieces"]
    assert all(found["p50"] <= found["p99"] <= found["most"] for found in report["milliseconds"].values())
    assert (report["model"], report["api"]) == ("fake", by)
    said = table(report)
    assert f"fake at {address}, by {by}, 2 at a time; at most 99 tokens, T = 0." in said
    assert "Complete: 5 of 5 requests" in said


@pytest.mark.parametrize(("by", "kind"), [("gRPC", "Overloaded"), ("HTTP", "HTTP 503")])
async def test_refusals_are_counted_and_not_retried(by: str, kind: str) -> None:
    async with deployment(by, Act(), FULL, Act(), FULL) as (address, server):
        report = await load(address, "--requests", "4", "--concurrency", "1")
    assert len(server.calls) == 5
    assert (report["complete"], report["errors"]) == (2, {kind: 2})
    assert report["tokens"] == 2 * len(TOKENS)
    assert f"Errors: 2 of {kind}, such as: " in table(report)
    assert "refused" in report["examples"][kind]


@pytest.mark.parametrize(("by", "kind"), [("gRPC", "DeadlineExceeded"), ("HTTP", "timeout")])
async def test_a_request_that_takes_too_long_is_an_error(by: str, kind: str) -> None:
    async with deployment(by, Act(), Act(tokens=3, then="hold")) as (address, _):
        report = await load(address, "--requests", "2", "--concurrency", "1", "--timeout", "0.3")
    assert (report["complete"], report["errors"]) == (1, {kind: 1})


@pytest.mark.parametrize("by", ["gRPC", "HTTP"])
async def test_prompts_of_a_file_are_sent_in_turn(by: str, tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "hello"}]}
    lines = [{"text": ""}, chat, {"tokens": [5, 6]}]
    (tmp_path / "prompts").write_text("\n".join(map(json.dumps, lines)))
    async with deployment(by) as (address, server):
        await load(
            *(address, "--prompt-file", str(tmp_path / "prompts"), "--requests", "4", "--concurrency", "1"),
            *("--warm-up", "0"),
        )
    asked = [call.request for call in server.calls]
    assert [request.WhichOneof("prompt") for request in asked] == ["text", "chat", "tokens", "text"]
    assert (asked[1].chat.messages[0].content, list(asked[2].tokens.ids)) == ("hello", [5, 6])


async def test_texts_are_sent_as_messages_if_asked() -> None:
    async with deployment("HTTP") as (address, server):
        report = await load(f"{address}/v1/", "--chat", "--requests", "2", "--prompt-characters", "20")
    assert {len(call.request.chat.messages[0].content) for call in server.calls} == {20}
    assert report["tokens"] == 2 * len(TOKENS)


async def test_requests_arrive_at_the_rate_whatever_the_answers() -> None:
    """The first request is never answered, and delays no other."""
    async with deployment("gRPC", Act(then="hold", tokens=1)) as (address, server):
        options = ("--rate", "500", "--requests", "20", "--warm-up", "0", "--timeout", "1")
        report = await load(address, *options)
    assert len(server.calls) == 20
    assert (report["complete"], report["errors"]) == (19, {"DeadlineExceeded": 1})
    assert report["load"] == "500 arriving a second"


async def test_poisson_times_end() -> None:
    due = [when async for when in at_poisson_times(1000.0, 0.05, seed=1)]
    assert 20 < len(due) < 90
    assert due == sorted(due)
    assert due[-1] <= 0.05


EVENT = {"choices": [{"index": 0, "text": "a", "finish_reason": None}]}
LAST = {"choices": [{"index": 0, "text": "b", "finish_reason": "stop"}]}


@asynccontextmanager
async def scripted(*events: str) -> AsyncIterator[str]:
    """Serve HTTP, answering every request for a completion with these events."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        if head.startswith("GET"):
            body = b'{"data": [{"id": "m"}]}'
        else:
            body = "".join(f"data: {event}\n\n" for event in events).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-type: text/event-stream\r\n\r\n" + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize(
    ("events", "error"),
    [
        ((json.dumps(EVENT), '{"error": {"message": "the engine failed"}}', "[DONE]"), "the engine failed"),
        ((json.dumps(EVENT),), "it stopped without a finish reason or [DONE]"),
        ((json.dumps(EVENT), "nonsense"), "an event is not one of OpenAI's: nonsense"),
        (('["a", "list"]',), 'an event is not one of OpenAI\'s: ["a", "list"]'),
    ],
)
async def test_a_broken_stream_is_an_error(events: tuple[str, ...], error: str) -> None:
    async with scripted(*events) as address:
        report = await load(address, "--requests", "1")
    assert (report["complete"], report["errors"]) == (0, {"broken stream": 1})
    assert report["examples"] == {"broken stream": error}


async def test_pieces_are_counted_where_no_usage_is_told() -> None:
    async with scripted(json.dumps(EVENT), json.dumps(LAST), "[DONE]") as address:
        report = await load(address, "--requests", "3")
    assert (report["complete"], report["tokens"]) == (3, 6)
    assert "The server reports no token counts: pieces are counted instead." in table(report)


@pytest.mark.parametrize(
    ("by", "change", "hint"),
    [
        ("gRPC", "http://{}".format, "; if it is an orchestrator, leave out http://"),
        ("HTTP", lambda url: url.removeprefix("http://"), "; if it speaks HTTP, write http:// before its address"),
    ],
)
async def test_an_address_of_the_other_protocol_is_refused_with_a_hint(
    by: str, change: Callable[[str], str], hint: str
) -> None:
    async with deployment(by) as (address, _):
        with pytest.raises(DeploymentError) as refused:
            await load(change(address))
    assert str(refused.value).endswith(hint)


@pytest.mark.parametrize("by", ["gRPC", "HTTP"])
async def test_a_model_that_is_not_served_is_refused(by: str) -> None:
    async with deployment(by) as (address, server):
        with pytest.raises(DeploymentError, match="does not serve other, but fake"):
            await load(address, "--model", "other")
        await load(address, "--model", "fake", "--requests", "1")
    assert len(server.calls) == 2


@pytest.mark.parametrize("by", ["gRPC", "HTTP"])
async def test_a_model_may_be_chosen_by_an_alias(by: str) -> None:
    async with deployment(by) as (address, server):
        server.aliases = ["best"]
        await load(address, "--model", "best", "--requests", "1")
    assert {call.request.model for call in server.calls} == {"best"}


@pytest.mark.parametrize(
    ("address", "said"),
    [("127.0.0.1:1", "if it speaks HTTP, write http:// before its address"), ("http://127.0.0.1:1", "/v1/models: ")],
)
def test_an_address_without_a_server_is_one_sentence(address: str, said: str) -> None:
    with pytest.raises(SystemExit) as ending:
        main([address])
    assert str(ending.value).startswith(f"bench serve: {address}: ")
    assert said in str(ending.value)
    assert "\n" not in str(ending.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((), "the following arguments are required: ADDRESS"),
        (("nowhere",), "ADDRESS 'nowhere': "),
        (("http://",), "ADDRESS http:// has no host"),
        (("h:1", "--rate", "0"), "--rate is 0, must be from 0.001 to 10000"),
        (("h:1", "--rate", "nan"), "--rate is nan, must be from 0.001 to 10000"),
        (("h:1", "--rate", "fast"), "argument --rate: invalid float value: 'fast'"),
        (("h:1", "--rate", "1", "--concurrency", "2"), "not allowed with argument --rate"),
        (("h:1", "--requests", "0"), "--requests is 0, must be from 1 to 1000000"),
        (("h:1", "--temperature", "-1"), "--temperature is -1, must be from 0 to 100"),
        (("h:1", "--goodput", "itl:5"), "argument --goodput: 'itl:5' must be one of ttft:MILLISECONDS, "),
        (("h:1", "--goodput", "ttft:no"), "argument --goodput: 'ttft:no' must be one of"),
        (("h:1", "--prompt-file", "/nowhere"), "/nowhere: No such file or directory"),
        (("h:1", "--api-key-file", "/nowhere"), "'--api-key-file' /nowhere: No such file"),
        (("http://h:1", "--tls-ca", "/nowhere"), "--tls and --tls-ca are not for http://"),
        (("https://h:1", "--tls-ca", "/nowhere"), "--tls-ca: /nowhere: No such file"),
        (
            ("h:1", "--prompt-characters", "99999"),
            "--prompt-characters: 99999 is more than half of the longest prompt source file",
        ),
    ],
)
def test_wrong_options_are_one_sentence(given: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        parsed(given)
    assert ending.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("python -m bench serve: ")
    assert said in line


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "has no prompt"),
        ('{"text": "a", "seed": 1}', ":1: seed cannot be set here: all requests have the same"),
        ('{"txt": "a"}', ":1: must be an object with one of `text`, `tokens`, `messages`"),
    ],
)
def test_a_wrong_prompt_file_is_one_sentence(
    line: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts").write_text(line)
    with pytest.raises(SystemExit):
        parsed(["h:1", "--prompt-file", str(tmp_path / "prompts")])
    assert said in capsys.readouterr().err


def answer(*pieces: float, tokens: int, end: float | None, error: str | None = None) -> Answer:
    return Answer(0.0, list(pieces), tokens, end=end, error=error)


def test_latencies_and_goodput() -> None:
    answers = [
        answer(0.1, 0.2, 0.4, tokens=7, end=0.5),  # TPOT 50 ms, two pauses
        answer(0.3, tokens=1, end=0.3),  # no TPOT
        answer(0.9, 1.0, tokens=2, end=1.0),
        answer(0.1, tokens=1, end=0.2, error="HTTP 500"),
        answer(0.1, tokens=1, end=None),
    ]
    report = report_of(answers, {"ttft": 0.5, "tpot": 0.06}, now=2.0)
    assert (report["complete"], report["unfinished"], report["errors"]) == (3, 1, {"HTTP 500": 1})
    assert (report["seconds"], report["tokens"], report["tokens_a_second"]) == (2.0, 10, 5.0)
    latencies = report["milliseconds"]
    assert latencies["ttft"] == {"mean": 433.333, "p50": 300.0, "p90": 900.0, "p99": 900.0, "most": 900.0}
    assert (latencies["tpot"]["mean"], latencies["tpot"]["most"]) == (75.0, 100.0)
    assert (latencies["itl"]["p50"], latencies["itl"]["most"]) == (100.0, 200.0)
    assert latencies["e2e"]["most"] == 1000.0
    assert (report["good"], report["good_a_second"]) == (2, 1.0)
    said = table(report | about(parsed(["h:1"])) | {"model": "m", "api": "gRPC", "client_cores": 0.93})
    assert "This client took 0.93 of a core: the client may be the bottleneck." in said
    assert "Goodput: 1.00 requests a second, 40% of all, within TTFT 500 ms, TPOT 60 ms." in said
    assert "Unfinished: 1." in said
    assert "| pause between pieces (ITL), ms | 133.3 | 100.0 | 200.0 | 200.0 | 200.0 |" in said


@pytest.mark.verify
async def test_ctrl_c_prints_what_was_measured(tmp_path: Path) -> None:
    """Two answers are complete, and the third is under way."""
    async with FakeServer(Act(), Act(), Act(tokens=2, then="hold")) as server:
        command = (sys.executable, "-m", "bench", "serve", server.address, "--concurrency", "1", "--warm-up", "0")
        process = await asyncio.create_subprocess_exec(*command, "--out", str(tmp_path), stdout=PIPE, stderr=PIPE)
        await asyncio.wait_for(server.held.wait(), 60)
        process.send_signal(signal.SIGINT)
        said, complained = await asyncio.wait_for(process.communicate(), 60)
    assert (process.returncode, complained.decode()) == (130, "")
    assert said.decode().startswith("CUT OFF: results so far.")
    assert "Complete: 2 of 3 requests" in said.decode()
    assert "Unfinished: 1." in said.decode()
    report: dict[str, Any] = json.loads((tmp_path / "serve.json").read_text())
    assert report["tokens"] == 2 * len(TOKENS)


async def test_a_load_without_a_complete_answer_fails(capsys: pytest.CaptureFixture[str]) -> None:
    async with scripted("nonsense") as address:
        with pytest.raises(SystemExit) as ending:
            await asyncio.to_thread(main, [address, "--requests", "2"])
    assert ending.value.code == 1
    assert "Complete: 0 of 2 requests" in capsys.readouterr().out
