"""`specdec stats` serves all three services, and fails for other servers with a one-line error."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import pty
import signal
import socket
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import grpc
import pytest
from google.protobuf.json_format import ParseDict
from google.protobuf.message import Message
from grpc_health.v1 import health, health_pb2_grpc
from rich.console import Console

from draft_service.draft_loop import DraftLoop
from draft_service.language_model import LanguageModelDrafter
from draft_service.servicer import DraftLimits, DraftServicer
from orchestrator.models.catalog import Catalog
from orchestrator.pods.peers import Peers
from orchestrator.pods.pods import Pods
from orchestrator.requests.model import ServedModel
from orchestrator.servicer import GenerationServicer
from specdec.cli.pod_stats import PodStats, Stats
from specdec.cli.stats import Redrawn
from specdec.cli.stats_table import grid, percent, span, table
from specdec.engine.model_directory import ModelDirectory
from specdec.exit_status import ExitStatus
from specdec.local import DEMO
from specdec.serving.process.server import Servicer
from specdec.v2.draft_pb2 import (
    DRAFT_VERSION_STATE_REFUSED,
    DRAFT_VERSION_STATE_SERVING,
    DraftServiceGetStatsResponse,
    DraftVersion,
)
from specdec.v2.generation_pb2 import (
    BREAKER_STATE_HALF_OPEN,
    BREAKER_STATE_OPEN,
    GenerationServiceGetStatsResponse,
    PodView,
    SampleCounts,
)
from specdec.v2.model_pb2 import ModelIdentity, PodCapacity, PodInfo, SpeculationDecisions
from specdec.v2.verifier_pb2 import GetStatsResponse
from tests.draft_service.fakes import Engine
from tests.stack import served
from tests.verifier_service.test_backend_seam import Counting
from verifier_service.servicer import VerifierLimits, VerifierServicer

IDENTITY = ModelIdentity(model="m", vocabulary_size=16, context_tokens=99, model_fingerprint=64 * "a")


async def run(*arguments: str) -> tuple[int, str, str]:
    """Return (status, stdout, stderr) of `specdec stats`."""
    command = (sys.executable, "-m", "specdec.cli", "stats", *arguments)
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)
    async with asyncio.timeout(60):
        out, errors = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), errors.decode()


@pytest.fixture
async def services() -> AsyncIterator[dict[str, str]]:
    """Yield the addresses of the three services, by role; they have no models."""
    backend, drafting = Counting(), DraftLoop(LanguageModelDrafter(Engine()))
    backend.start()
    drafting.start()
    async with AsyncExitStack() as exits:
        model = ServedModel.of(ModelDirectory(DEMO / "target"))
        servicers: dict[str, Servicer] = {
            "orchestrator": GenerationServicer(Catalog.of(model, Peers(Pods(["127.0.0.1:1"]), Pods(["127.0.0.1:2"])))),
            "verifier": VerifierServicer(backend, IDENTITY, VerifierLimits()),
            "draft": DraftServicer(drafting, IDENTITY, DraftLimits()),
        }
        yield {role: (await exits.enter_async_context(served(each)))[0] for role, each in servicers.items()}


@pytest.mark.parametrize("role", ["orchestrator", "verifier", "draft"])
async def test_one_command_for_any_service(services: dict[str, str], role: str) -> None:
    address = services[role]
    (status, shown, _), (_, told, _) = await asyncio.gather(run(address), run(address, "--json"))
    assert status == 0
    assert shown.startswith(f"{role} at {address}\n  process      ")
    values = json.loads(told)
    assert (values["role"], values["address"]) == (role, address)
    assert isinstance(values["up_us"], int)
    if role == "orchestrator":
        assert "\n  state        not serving\n" in shown  # no verifier found
        assert "  verifiers    127.0.0.1:1  breaker closed, 0 sessions from here\n" in shown
        assert [pod["breaker"] for pod in values["drafts"]] == ["BREAKER_STATE_CLOSED"]
    else:
        assert "\n  state        serving\n" in shown
        assert "\n  model        m, fingerprint aaaaaaaaaaaa, 99 tokens of context, 16 token ids\n" in shown
        assert isinstance(values["kv_tokens"], int)


async def test_an_address_with_nothing_behind_it_is_one_line(unused_tcp_port: int) -> None:
    address = f"127.0.0.1:{unused_tcp_port}"
    status, shown, errors = await run(address)
    assert (status, shown) == (ExitStatus.UNREACHABLE, "")
    assert errors.startswith(f"specdec: {address}: no gRPC server answers (")
    assert errors.count("\n") == 1


async def test_a_server_that_is_silent_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        assert await run(address, "--timeout", "0.3") == (
            ExitStatus.UNREACHABLE,
            "",
            f"specdec: {address}: no answer within 0.3 s\n",
        )


async def test_another_grpc_server_is_one_line() -> None:
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    status, shown, errors = await run(address)
    await server.stop(None)
    assert (status, shown) == (ExitStatus.REFUSED, "")
    assert errors.startswith(f"specdec: {address}: a gRPC server answers, but has no statistics of a specdec.v2 orch")
    assert errors.count("\n") == 1


async def test_a_watch_goes_on_until_it_is_interrupted(services: dict[str, str]) -> None:
    where = ("--address", services["draft"])
    command = (sys.executable, "-m", "specdec.cli", "stats", *where, "--watch", "0.1", "--json")
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)
    assert process.stdout is not None
    async with asyncio.timeout(60):
        looks = [json.loads(await process.stdout.readline()) for _ in range(3)]
        process.send_signal(signal.SIGINT)
        _, errors = await process.communicate()
    assert (process.returncode, errors) == (ExitStatus.INTERRUPTED, b"")
    assert looks[0]["up_us"] < looks[1]["up_us"] < looks[2]["up_us"]


# --- what is printed --------------------------------------------------------------------------------

POD = PodInfo(version="1.2", process_id=7, device="cpu", dtype="bfloat16", threads=[4, 3])
VERIFIER = GetStatsResponse(
    pod=POD,
    identity=IDENTITY,
    up_us=200_000_000,
    busy_us=50_000_000,
    running=2,
    waiting=1,
    throttled=1,
    sessions=3,
    max_sessions=5,
    max_waiting=4,
    kv_tokens=1000,
    kv_held_tokens=100,
    kv_cached_tokens=50,
    steps=10,
    rows=35,
    committed_tokens=1 << 40,
    offered_candidates=8,
    accepted_candidates=6,
    fast_paths_off=["a: off, b; c", "d: off, e; f"],
    mode="off",
    sources={"ngram": 4, "remote_draft": 2, "plain": 7},
    decisions=SpeculationDecisions(
        modes={"off": 5, "ngram": 3},
        without={"plain_faster": 5, "row_cost": 1},
        row_us=1400,
        break_even=0.5,
        best_candidate=0.25,
        mode_rates={"off": 90.0, "ngram": 80.0},
    ),
)
ORCHESTRATOR = GenerationServiceGetStatsResponse(
    pod=PodInfo(version="1.2", process_id=7),
    requests=9,
    failed_requests={"OVERLOADED": 3},
    failover_events={"verifier_lost": 2, "draft_back": 1, "draft_paused": 38, "draft_useless": 3},
    decisions=SpeculationDecisions(modes={"ngram": 3}, mode_rates={"ngram": 80.0}),
    sources={"ngram": 6, "bonus": 3},
    all_samples=SampleCounts(tokens=900, steps=300, offered_candidates=800, accepted_candidates=600),
    verifiers=[
        PodView(address="a:1", breaker=BREAKER_STATE_OPEN),
        PodView(
            address="b.c:1",
            breaker=BREAKER_STATE_HALF_OPEN,
            unfit_reason="draft_lost",
            sessions=1,
            capacity=PodCapacity(sessions=4, room=6),
        ),
    ],
)
DRAFT = DraftServiceGetStatsResponse(pod=POD, up_us=3_000_000, sent_candidates=30, committed_tokens=4, guessed_tokens=3)


def lines(role: str, stats: Stats, before: Stats | None = None) -> list[str]:
    return list(table("h:1", snapshot(role, stats), before and snapshot(role, before)))


def snapshot(role: str, stats: Stats, *, started: float = 0.0) -> PodStats:
    """Return the statistics as of a process that started at `started` seconds."""
    return PodStats(role, stats, started + stats.up_us / 1e6)


def test_the_lines_of_a_verifier() -> None:
    shown = lines("verifier", VERIFIER)
    assert shown[:2] == ["verifier at h:1", "  process      7, specdec 1.2, up 3 min 20 s"]
    for line in (
        "  computes     on cpu in bfloat16, with 4 or 3 threads, not exact",
        "  sessions     3 open (at most 5): 2 running, 1 waiting (at most 4 new ones), 1 of them throttled",
        "  KV memory    1000 tokens, 10 % held, 5 % cached",
        "  steps        10 of 3.5 rows each; 25 % busy since the start",
        "  candidates   8 verified, 6 accepted (75 %): n-grams 4, draft service 2",
        "  speculation  now off; so far off (5 steps), n-grams (3 steps): 2 of 8 steps had candidates; 5 had none: "
        "plain decoding is as fast (tokens/s: plain 90, n-grams 80); 1 had none: a row costs 1.4 ms and must bring "
        "0.50 tokens, the best candidate brings 0.25",
        "  fast paths   a: off, b; c",
        "               d: off, e; f",
    ):
        assert line in shown


def test_the_lines_of_an_orchestrator() -> None:
    shown = lines("orchestrator", ORCHESTRATOR)
    for line in (
        "  requests     9: 0 running, 0 cancelled, failed: 3 OVERLOADED",
        "  speculation  so far n-grams: 3 of 3 steps had candidates",
        f"{' ' * 15}tokens/s by mode, as last measured: n-grams 80",
        "  drafting     38 draft_paused, 3 draft_useless",
        "  failover     1 draft_back, 2 verifier_lost",
        "  verifiers    a:1    breaker open, 0 sessions from here",
        f"{' ' * 15}b.c:1  unfit: draft_lost, breaker half-open, 1 session from here, 4 in all, room for 6 more",
        "  drafts       none",
    ):
        assert line in shown


def test_versions_of_a_draft_have_a_line_each() -> None:
    of_first = DraftVersion(
        name="first",
        state=DRAFT_VERSION_STATE_SERVING,
        sessions=3,
        committed_tokens=200,
        guessed_tokens=150,
        passes=40,
        busy_us=100_000,
    )
    refused = DraftVersion(name="v2", state=DRAFT_VERSION_STATE_REFUSED, reason="no weights")
    newer = DraftVersion(name="v3", state=99)  # type: ignore[arg-type]  # of a draft of a later version
    seen = lines("draft", DraftServiceGetStatsResponse(pod=POD, versions=[of_first, refused, newer]))
    at = seen.index("  versions     first  serving, 3 sessions, 75 % of 200 tokens guessed, 400 passes a busy second")
    assert seen[at + 1 : at + 3] == [f"{' ' * 15}v2  refused: no weights", f"{' ' * 15}v3  unknown"]
    assert not any(line.startswith("  versions") for line in lines("draft", DRAFT))


def test_a_breaker_state_of_a_newer_orchestrator_is_unknown() -> None:
    pod = PodView(address="a:1", breaker=99)  # type: ignore[arg-type]
    seen = lines("orchestrator", GenerationServiceGetStatsResponse(pod=POD, verifiers=[pod]))
    assert "  verifiers    a:1  breaker unknown, 0 sessions from here" in seen


def test_rates_are_those_since_the_look_before() -> None:
    before = DraftServiceGetStatsResponse(pod=POD, up_us=1_000_000, sent_candidates=10)
    assert "  candidates   30 sent in 0 messages (10/s)" in lines("draft", DRAFT, before)
    before.pod.process_id = 8  # another process: its counters are unrelated
    assert "  candidates   30 sent in 0 messages" in lines("draft", DRAFT, before)


@pytest.mark.parametrize("up", [5_000_000, 4_000_000_000])
def test_a_restarted_container_has_the_same_process_id(up: int) -> None:
    before, after = GetStatsResponse(), GetStatsResponse()
    before.CopyFrom(VERIFIER)
    after.CopyFrom(VERIFIER)
    before.up_us, before.busy_us, before.steps, before.committed_tokens = 3_600_000_000, 3_000_000_000, 9000, 9000
    after.up_us, after.busy_us, after.steps, after.committed_tokens = up, 1_000_000, 3, 5
    looks = snapshot("verifier", after, started=9000.0), snapshot("verifier", before)
    shown = "\n".join(table("h:1", *looks))
    assert "busy since the start" in shown
    assert "/s)" not in shown


def test_a_watch_shows_what_happens_now() -> None:
    """Its rates include texts that have not ended."""
    before = GenerationServiceGetStatsResponse(
        pod=PodInfo(version="1.2", process_id=7),
        all_samples=SampleCounts(tokens=400, steps=100, offered_candidates=300, accepted_candidates=250),
    )
    after = GenerationServiceGetStatsResponse()
    after.CopyFrom(ORCHESTRATOR)
    after.up_us = 2_000_000
    assert lines("orchestrator", after, before)[1] == (
        "  now          250 tokens/s, 2.50 a step, 350 of 500 candidates accepted (70 %)"
    )
    idle = GenerationServiceGetStatsResponse()
    idle.CopyFrom(after)
    idle.up_us += 1_000_000
    assert lines("orchestrator", idle, after)[1] == "  now          0 tokens/s"
    assert not any(line.startswith("  now") for line in lines("draft", DRAFT, DRAFT))


def test_a_terminal_gets_texts_broken_between_words() -> None:
    console = Console(file=io.StringIO(), width=60, highlight=False)
    console.print(grid("h:1", snapshot("verifier", VERIFIER), None))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue().splitlines()
    assert shown[0].rstrip() == "verifier at h:1"
    words = {word for line in shown for word in line.split()}
    assert {"fingerprint", "context,", "throttled"} <= words
    assert all(line.startswith(("  ", "verifier")) for line in shown)
    assert any(line.startswith(" " * 14) and line.strip() for line in shown)


def test_a_terminal_gets_an_ipv6_address() -> None:
    console = Console(file=io.StringIO(), width=60, highlight=False)
    console.print(grid("[fd00::5]:50051", snapshot("verifier", VERIFIER), None))
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines()[0].rstrip() == "verifier at [fd00::5]:50051"


async def test_a_watch_at_a_terminal_is_drawn_in_place(services: dict[str, str]) -> None:
    ours, theirs = pty.openpty()
    command = (sys.executable, "-m", "specdec.cli", "stats", services["draft"], "--watch", "0.1")
    process = await asyncio.create_subprocess_exec(
        *command, stdin=theirs, stdout=theirs, stderr=theirs, env=os.environ | {"TERM": "xterm", "COLUMNS": "100"}
    )
    os.close(theirs)
    seen = b""
    async with asyncio.timeout(60):
        while seen.count(b"draft at") < 3:
            seen += await asyncio.to_thread(os.read, ours, 65536)
        process.send_signal(signal.SIGINT)
        drained = asyncio.create_task(asyncio.to_thread(_drain, ours))
        assert await process.wait() == ExitStatus.INTERRUPTED
        await drained
    os.close(ours)
    assert b"\x1b[1A" in seen  # the cursor goes up over the last block
    assert b"Traceback" not in seen


def test_a_problem_is_seen_on_a_low_terminal() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, color_system=None, width=60, height=5)
    with Redrawn("h:1", console) as shown:
        shown(snapshot("verifier", VERIFIER))
        shown.problem("specdec: h:1: no answer within 5 s")
        assert isinstance(console.file, io.StringIO)
        assert "no answer within 5 s" in console.file.getvalue()


def _drain(end: int) -> None:
    with contextlib.suppress(OSError):  # the process has ended
        while os.read(end, 65536):
            pass


@pytest.mark.parametrize("stats", [VERIFIER, ORCHESTRATOR, DRAFT], ids=["verifier", "orchestrator", "draft"])
def test_nothing_is_lost_in_json(stats: Message) -> None:
    told = json.loads(json.dumps(PodStats("x", stats, 0.0).as_json()))  # type: ignore[arg-type]
    assert told.pop("role") == "x"
    assert ParseDict(told, type(stats)()) == stats
    assert list(told) == [field.name for field in stats.DESCRIPTOR.fields if field.name in told]


def test_numbers_are_numbers_in_json() -> None:
    assert snapshot("verifier", VERIFIER).as_json()["committed_tokens"] == 1 << 40
    told = snapshot("orchestrator", ORCHESTRATOR).as_json()
    assert told["failed_requests"] == {"OVERLOADED": 3}
    assert told["verifiers"][1]["capacity"]["room"] == 6


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.9, "0 s"), (59, "59 s"), (60, "1 min 0 s"), (3725, "1 h 2 min"), (90_000, "1 d 1 h")],
)
def test_a_span_has_two_units(seconds: float, text: str) -> None:
    assert span(seconds) == text


def test_a_server_does_not_steer_the_terminal() -> None:
    hostile = GetStatsResponse(identity=ModelIdentity(model="m\x1b[2J\nx"), fast_paths_off=["a\x07"])
    shown = lines("verifier", hostile)
    assert all(line.isprintable() for line in shown)
    assert any("m\N{REPLACEMENT CHARACTER}[2J" in line for line in shown)


def test_a_part_of_nothing_is_nothing() -> None:
    assert (percent(0, 0), percent(1, 3)) == ("0 %", "33 %")
