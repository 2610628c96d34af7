"""`--workers`, with real processes: serving, restarts, and no process left behind."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from orchestrator.workers import Workers
from specdec.engine.model_directory import ModelDirectory
from specdec.local import DEMO
from specdec.serving import checksum
from specdec.serving.identity import PROTOCOL_VERSION
from specdec.serving.process import restarts
from specdec.serving.process.restarts import DEATHS
from specdec.serving.process.server import StartError
from specdec.v2 import (
    generation_pb2,
    generation_pb2_grpc,
    model_pb2,
    trace_pb2,
    trace_pb2_grpc,
    verifier_pb2,
    verifier_pb2_grpc,
)
from testing.processes import alive, children_of
from tests.stack import request_of, served, until

WORKERS = 2
LONG = 4000
"""Tokens of a text that runs until the test ends it."""

LAST = 6
"""Its end token."""

PATIENCE = 120.0

pytestmark = pytest.mark.timeout(600)


class SlowVerifier(verifier_pb2_grpc.VerifierServiceServicer):
    """Commits a token now and then, until a text may end."""

    name = "specdec.v2.VerifierService"

    def __init__(self) -> None:
        self.open: Counter[str] = Counter()  # sessions by the process that opened them
        self.may_end = asyncio.Event()

    def register(self, server: grpc.aio.Server) -> None:
        verifier_pb2_grpc.add_VerifierServiceServicer_to_server(self, server)

    async def close(self) -> None:
        pass

    async def Verify(self, request_iterator: AsyncIterator[verifier_pb2.VerifyRequest], context: Any) -> None:  # type: ignore[override]
        opening = (await anext(aiter(request_iterator))).open
        directory = ModelDirectory(DEMO / "target")
        identity = model_pb2.ModelIdentity(
            protocol_version=PROTOCOL_VERSION,
            tokenizer_fingerprint=directory.tokenizer_fingerprint,
            context_tokens=directory.context,
        )
        worker = context.peer()
        self.open[worker] += 1
        try:
            await context.write(verifier_pb2.VerifyResponse(opened=verifier_pb2.VerifyOpened(identity=identity)))
            base, said = len(opening.prompt_tokens), checksum.of_opening(opening)
            while True:
                token, finish = 5, model_pb2.FINISH_REASON_UNSPECIFIED
                if self.may_end.is_set():
                    token, finish = LAST, model_pb2.FINISH_REASON_STOP
                elif opening.max_tokens < LONG:  # a request of one token
                    finish = model_pb2.FINISH_REASON_LENGTH
                said = checksum.extended(said, [token], finish)
                commit = verifier_pb2.Commit(
                    committed=model_pb2.Committed(base=base, tokens=[token]),
                    sources=[model_pb2.TOKEN_SOURCE_PLAIN],
                    steps=1,
                    finish_reason=finish,
                    checksum=said,
                )
                await context.write(verifier_pb2.VerifyResponse(commit=commit))
                base += 1
                await asyncio.sleep(0.1)
        finally:
            self.open[worker] -= 1

    async def FindPrefix(
        self, request: verifier_pb2.FindPrefixRequest, context: Any
    ) -> verifier_pb2.FindPrefixResponse:
        return verifier_pb2.FindPrefixResponse()

    async def GetStats(self, request: verifier_pb2.GetStatsRequest, context: Any) -> verifier_pb2.GetStatsResponse:
        return verifier_pb2.GetStatsResponse()

    @property
    def workers(self) -> int:
        """Return the number of processes with sessions."""
        return len(+self.open)


@pytest.fixture
async def verifier() -> AsyncIterator[tuple[SlowVerifier, str]]:
    slow = SlowVerifier()
    async with served(slow) as (address, _):
        yield slow, address


async def spawn(*options: str) -> Process:
    command = (sys.executable, "-m", "orchestrator", "--model", str(DEMO / "target"), "--port", "0", *options)
    return await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=PIPE)


async def address_of(process: Process) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE):
        ready, address = (await process.stdout.readline()).decode().split()
    assert ready == "ready"
    return address


@asynccontextmanager
async def orchestrator(verifier: str, *options: str) -> AsyncIterator[Process]:
    """Yield a process; end it and its workers on leaving."""
    process = await spawn("--verifier", verifier, "--log-level", "warning", *options)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def ended(process: Process) -> tuple[int, str, str]:
    """Return (status, rest of stdout, stderr)."""
    async with asyncio.timeout(PATIENCE):
        out, errors = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), errors.decode()


class Clients:
    """Streams, each over its own connection, since a connection stays with one worker."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.streams: list[asyncio.Task[grpc.StatusCode]] = []
        self.errors: list[str] = []

    async def stream(self, tokens: int = LONG) -> None:
        """Start a stream and read it in the background; the task's result is the final status. The stream's number is
        its request id."""
        begun, number = asyncio.Event(), str(len(self.streams))

        async def read() -> grpc.StatusCode:
            options = (("grpc.use_local_subchannel_pool", 1),)
            async with grpc.aio.insecure_channel(self._address, options=options) as channel:
                stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
                asked = request_of([5], max_tokens=tokens, ignore_end_token=True, stop_tokens=[LAST])
                # A connection may be reset while workers come and go: gRPC tries again until the call is sent.
                call = stub.Generate(asked, metadata=(("x-request-id", number),), wait_for_ready=True)
                try:
                    async for response in call:
                        assert isinstance(response, generation_pb2.GenerateResponse)
                        begun.set()
                except grpc.aio.AioRpcError as error:
                    self.errors.append(f"{number}: {error.details()}")
                    return error.code()
                finally:
                    begun.set()
                return grpc.StatusCode.OK

        self.streams.append(asyncio.create_task(read()))
        await begun.wait()

    async def reach_all(self, verifier: SlowVerifier) -> None:
        """Start streams until every worker has one: the kernel picks at random among ready workers."""
        async with asyncio.timeout(PATIENCE):
            while verifier.workers < WORKERS:
                await self.stream()
                await asyncio.sleep(0.02)

    async def ends(self) -> Counter[grpc.StatusCode]:
        async with asyncio.timeout(PATIENCE):
            return Counter(await asyncio.gather(*self.streams))


async def test_a_worker_that_dies_is_replaced_and_all_drain(verifier: tuple[SlowVerifier, str]) -> None:
    slow, to_verifier = verifier
    async with orchestrator(to_verifier, "--workers", str(WORKERS)) as process:
        address = await address_of(process)
        victim, survivor = children_of(process.pid)
        clients = Clients(address)
        await clients.reach_all(slow)

        # 1. Any worker tells of the requests of all.
        async with grpc.aio.insecure_channel(address) as channel:
            stub: Any = trace_pb2_grpc.TraceServiceStub(channel)
            for number in range(len(clients.streams)):
                (timeline,) = (await stub.GetTrace(trace_pb2.GetTraceRequest(request_id=str(number)))).timelines
                assert timeline.service == "orchestrator"
                assert [event.name for event in timeline.events][:2] == ["parsed", "verifier_opened"]

        # 2. The killed worker's streams end, and nothing else.
        before = slow.open.total()
        os.kill(victim, signal.SIGKILL)
        await until(lambda: slow.workers == 1)
        survived = slow.open.total()
        assert 0 < survived < before
        await until(lambda: sum(stream.done() for stream in clients.streams) == before - survived)

        # 3. New requests are served, by the other worker or by the replacement, which gets its share.
        await until(lambda: victim not in children_of(process.pid))
        brief = Clients(address)
        for _ in range(3):
            await brief.stream(tokens=1)
        assert await brief.ends() == {grpc.StatusCode.OK: 3}
        await until(lambda: len(children_of(process.pid)) == WORKERS)
        assert survivor in children_of(process.pid)
        newcomers = Clients(address)
        await newcomers.reach_all(slow)

        # 4. SIGTERM: running requests are finished.
        workers = children_of(process.pid)
        process.terminate()
        await until(lambda: not accepts(address))
        slow.may_end.set()
        assert await clients.ends() == {grpc.StatusCode.OK: survived, grpc.StatusCode.UNAVAILABLE: before - survived}
        assert set(await newcomers.ends()) == {grpc.StatusCode.OK}, newcomers.errors
        status, out, errors = await ended(process)
        assert (status, out) == (0, "")
        assert errors.count("worker_died") == 1
        assert f'"pid": {victim}, "status": -9' in errors
        assert not any(map(alive, workers))


def accepts(address: str) -> bool:
    host, port = address.split(":")
    with socket.socket() as client:
        return client.connect_ex((host, int(port))) == 0


async def test_workers_do_not_outlive_a_killed_supervisor() -> None:
    async with orchestrator("127.0.0.1:1", "--workers", "2") as process:
        await address_of(process)
        workers = children_of(process.pid)
        assert len(workers) == 2
        process.kill()
        await until(lambda: not any(map(alive, workers)))


async def test_the_end_of_stdin_ends_all() -> None:
    async with orchestrator("127.0.0.1:1", "--workers", "2", "--stop-with-stdin", "--log-level", "error") as process:
        await address_of(process)
        workers = children_of(process.pid)
        assert process.stdin is not None
        process.stdin.close()
        assert await ended(process) == (0, "", "")
        assert not any(map(alive, workers))


@pytest.mark.verify
async def test_a_supervisor_whose_workers_cannot_stay_up_says_why() -> None:
    async with orchestrator("127.0.0.1:1", "--workers", "2") as process:
        await address_of(process)
        killed: set[int] = set()
        async with asyncio.timeout(PATIENCE):
            while process.returncode is None:
                for pid in set(children_of(process.pid)) - killed:
                    if len(killed) < 2 * DEATHS - 1:  # then one of the two has died DEATHS times
                        os.kill(pid, signal.SIGKILL)
                        killed.add(pid)
                await asyncio.sleep(0.01)
        status, out, errors = await ended(process)
        assert (status, out) == (1, "")
        assert "orchestrator: a worker died 5 times in a row, most recently: killed by SIGKILL" in errors
        assert "Traceback" not in errors


READY_FOR_LONG = "import time; print('ready', flush=True); time.sleep(600)"


@pytest.fixture
def quick_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "FIRST_PAUSE_SECONDS", 0.01)


@pytest.mark.usefixtures("quick_restarts")
async def test_workers_that_cannot_stay_up_are_given_up() -> None:
    ready = asyncio.Event()
    workers = Workers(lambda number: [sys.executable, "-c", READY_FOR_LONG], ready.set)
    running = asyncio.create_task(workers.run(2))
    killed: set[Process] = set()
    async with asyncio.timeout(PATIENCE):
        await ready.wait()
        while not running.done():
            for process in set(workers._processes) - killed:
                if len(killed) < 2 * DEATHS - 1:  # then one of the two has died DEATHS times
                    with contextlib.suppress(ProcessLookupError):  # the last one is ended anyway
                        process.kill()
                    killed.add(process)
            await asyncio.sleep(0.01)
    with pytest.raises(StartError, match="a worker died 5 times in a row, most recently: killed by SIGKILL"):
        await running
    assert all(process.returncode is not None for process in killed)


@pytest.mark.usefixtures("quick_restarts")
async def test_many_that_die_at_once_are_all_started_again() -> None:
    """For lack of memory, for example: only each worker's own consecutive deaths count."""
    count, ready = 2 * DEATHS, asyncio.Event()
    workers = Workers(lambda number: [sys.executable, "-c", READY_FOR_LONG], ready.set)
    running = asyncio.create_task(workers.run(count))
    async with asyncio.timeout(PATIENCE):
        await ready.wait()
        first = set(workers._processes)
        for process in first:
            process.kill()
        await until(lambda: len(workers._processes - first) == count)
        workers.end(signal.SIGTERM)
        await running


@pytest.mark.usefixtures("quick_restarts")
async def test_a_worker_that_cannot_be_started_now_is_started_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, while the machine lacks memory for it. The other workers go on."""
    ready, spawn, refused = asyncio.Event(), asyncio.create_subprocess_exec, iter((False, False, True, True, False))

    async def scarce(*command: str, **options: Any) -> Process:
        if next(refused):
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return await spawn(*command, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", scarce)
    workers = Workers(lambda number: [sys.executable, "-c", READY_FOR_LONG], ready.set)
    running = asyncio.create_task(workers.run(2))
    async with asyncio.timeout(PATIENCE):
        await ready.wait()
        (one, other) = workers._processes
        one.kill()
        await until(lambda: len(workers._processes) == 2 and one not in workers._processes)
        assert other in workers._processes
        workers.end(signal.SIGTERM)
        await running


async def test_one_worker_is_the_process_itself() -> None:
    async with orchestrator("127.0.0.1:1", "--workers", "1") as process:
        await address_of(process)
        assert children_of(process.pid) == []


@pytest.mark.parametrize("number", ["0", pytest.param("1000", marks=pytest.mark.verify)])
async def test_numbers_that_make_no_sense_are_refused(number: str) -> None:
    status, out, errors = await ended(await spawn("--verifier", "127.0.0.1:1", "--workers", number))
    assert (status, out) == (2, "")
    assert "--workers" in errors


async def test_a_start_that_fails_says_why() -> None:
    missing = ("--verifier", "127.0.0.1:1", "--workers", "2", "--model", "/nonexistent")
    status, out, errors = await ended(await spawn(*missing))
    assert (status, out) == (1, "")
    assert errors.endswith("orchestrator: /nonexistent: no such directory\n")
    assert "Traceback" not in errors


async def test_a_port_that_is_shared_already_is_taken() -> None:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        status, out, errors = await ended(await spawn("--verifier", "127.0.0.1:1", "--workers", "2", "--port", port))
    assert (status, out) == (1, "")
    assert errors.startswith(f"orchestrator: --port {port}: another program listens on 127.0.0.1:{port}: ")
    assert errors.count("\n") == 1
