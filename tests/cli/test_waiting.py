"""A command reports within a second or two what it is waiting for, based on the servers' health."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from specdec.cli import waiting as module
from specdec.cli.waiting import VERIFIER, WaitReporter
from tests.client.fake_server import TEXT, Act, FakeServer
from tests.stack import until

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@contextlib.asynccontextmanager
async def orchestrator(status: int = SERVING, *acts: Act) -> AsyncIterator[tuple[FakeServer, Any]]:
    """Yield an orchestrator and its health servicer, which reports `status` for the verifiers."""
    server, checks = FakeServer(*acts), health.aio.HealthServicer()
    await checks.set(VERIFIER, status)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server.server)
    async with server:
        yield server, checks


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the reporters of this process report sooner."""
    monkeypatch.setattr(module, "SILENT_SECONDS", 0.1)


@pytest.mark.usefixtures("impatient")
async def test_an_orchestrator_that_is_not_there_is_waited_for_by_its_address() -> None:
    async with FakeServer() as server:
        pass
    lines: list[str] = []
    with WaitReporter(server.address, lines.append):
        await until(lambda: bool(lines))
    assert lines == [f"waiting for an orchestrator: nothing answers at {server.address} yet; retrying for some seconds"]


@pytest.mark.usefixtures("impatient")
async def test_what_is_waited_for_is_said_once_and_when_it_changes() -> None:
    lines: list[str] = []
    async with orchestrator(NOT_SERVING) as (server, checks):
        with WaitReporter(server.address, lines.append) as waiting:
            await until(lambda: bool(lines))
            await checks.set(VERIFIER, SERVING)
            await until(lambda: len(lines) > 1)
            waiting.heard()
            await until(lambda: len(lines) > 2)
    assert lines[0] == f"waiting for a verifier: the orchestrator at {server.address} reaches none"
    assert lines[1].startswith(f"waiting for tokens from {server.address} (")
    assert lines[2:] == lines[1:2]


class SlowHealth(health.aio.HealthServicer):  # type: ignore[misc]
    """Answers no check in time."""

    async def Check(self, request: Any, context: Any) -> Any:
        await asyncio.Event().wait()


@pytest.mark.usefixtures("impatient")
async def test_an_orchestrator_that_answers_slowly_is_not_said_to_be_gone() -> None:
    server, lines = FakeServer(), list[str]()
    health_pb2_grpc.add_HealthServicer_to_server(SlowHealth(), server.server)
    async with server:
        with WaitReporter(server.address, lines.append):
            await until(lambda: bool(lines))
    assert lines == [f"waiting for an orchestrator: {server.address} answers slowly, if at all"]


@pytest.mark.usefixtures("impatient")
async def test_of_several_orchestrators_those_that_can_work_are_named() -> None:
    async with FakeServer() as gone:
        pass
    async with orchestrator() as (one, _), orchestrator(NOT_SERVING) as (other, _):
        lines: list[str] = []
        with WaitReporter(f"{gone.address},{one.address},{other.address}", lines.append):
            await until(lambda: bool(lines))
    assert [line.partition(" (")[0] for line in lines] == [f"waiting for tokens from {one.address}"]


async def generate(*arguments: str) -> asyncio.subprocess.Process:
    command = (sys.executable, "-m", "specdec.cli", "generate", *arguments)
    return await asyncio.create_subprocess_exec(*command, stdout=-1, stderr=-1)


async def test_the_command_says_that_there_is_no_verifier_and_goes_on() -> None:
    async with orchestrator(NOT_SERVING, Act(0, "hold")) as (server, _):
        process = await generate("hi", "--address", server.address)
        assert process.stderr is not None
        async with asyncio.timeout(60):
            line = await process.stderr.readline()
            assert (
                line == f"specdec: waiting for a verifier: the orchestrator at {server.address} reaches none\n".encode()
            )
            await server.stop()  # its replacement sends the whole text
            async with FakeServer(port=server.port):
                out, _ = await process.communicate()
    assert out.decode() == TEXT
    assert process.returncode == 0


async def test_a_text_that_breaks_off_says_how_far_it_came() -> None:
    async with FakeServer(Act(3, "abort", code=grpc.StatusCode.PERMISSION_DENIED)) as server:
        process = await generate("hi", "--address", server.address)
        async with asyncio.timeout(60):
            _, complained = await process.communicate()
    assert process.returncode == 65
    assert "\nended after 3 tokens, seed " in complained.decode()


@pytest.mark.parametrize("json_output", [True, pytest.param(False, marks=pytest.mark.verify)])
async def test_a_file_of_prompts_waits_aloud_too(tmp_path: Any, json_output: bool) -> None:
    file = tmp_path / "prompts"
    file.write_text('{"text": "a"}\n{"text": "b"}\n')
    async with FakeServer() as gone:
        pass
    process = await generate(
        "--prompt-file", str(file), "--address", gone.address, *(("--json",) if json_output else ())
    )
    async with asyncio.timeout(60):
        _, complained = await process.communicate()
    assert f"specdec: waiting for an orchestrator: nothing answers at {gone.address}" in complained.decode()
    assert process.returncode == 69


async def test_who_is_answered_soon_is_told_nothing() -> None:
    async with FakeServer() as server:
        process = await generate("hi", "--address", server.address)
        async with asyncio.timeout(60):
            _, complained = await process.communicate()
    assert b"waiting" not in complained
