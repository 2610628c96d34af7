"""The server as a process: readiness line, drain, and one-line start-up errors."""

from __future__ import annotations

import asyncio
import inspect
import signal
import ssl
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import httpx2
import openai
import pytest

from specdec.openai_api.__main__ import main
from specdec.serving.tls import server_credentials
from specdec.v2.generation_pb2_grpc import add_GenerationServiceServicer_to_server
from specdec.wire.tls_files import TlsFiles
from tests.certificates import Authority
from tests.client.fake_server import TEXT, Act, FakeServer
from tests.faults.pods import free_port

PATIENCE = 60  # seconds


async def spawn(*options: str) -> Process:
    command = (sys.executable, "-m", "specdec.openai_api", "--port", "0", "--log-level", "warning", *options)
    return await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=PIPE)


@asynccontextmanager
async def running(*options: str) -> AsyncIterator[tuple[Process, str]]:
    """Yield a serving process and its address; kill it on leaving."""
    process = await spawn(*options)
    try:
        assert process.stdout is not None
        ready, address = (await asyncio.wait_for(process.stdout.readline(), PATIENCE)).decode().split()
        assert ready == "ready"
        yield process, address
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_it_drains() -> None:
    """Running requests get their drain time and are then ended; the exit status is 0."""
    async with (
        FakeServer(Act(), Act(tokens=6, then="hold")) as server,
        running("--orchestrator", server.address, "--drain-seconds", "1") as (process, address),
        openai.AsyncOpenAI(base_url=f"http://{address}/v1", api_key="key", max_retries=0) as client,
    ):
        stream = await client.completions.create(model="fake", prompt="def", stream=True)
        await anext(aiter(stream))
        process.send_signal(signal.SIGTERM)
        _, complained = await asyncio.wait_for(process.communicate(), PATIENCE)
        await asyncio.wait_for(server.freed.wait(), PATIENCE)
    assert process.returncode == 0, complained


async def test_a_stream_that_a_drain_cuts_off_ends_with_an_error() -> None:
    async with (
        FakeServer(Act(tokens=3, then="hold")) as server,
        running("--orchestrator", server.address, "--drain-seconds", "0.2") as (process, address),
        openai.AsyncOpenAI(base_url=f"http://{address}/v1", api_key="key", max_retries=0) as client,
    ):
        stream = await client.completions.create(model="fake", prompt="def", stream=True)
        await asyncio.wait_for(server.held.wait(), PATIENCE)
        process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="the server is shutting down: use another one"):
            async for _ in stream:
                pass
        _, complained = await asyncio.wait_for(process.communicate(), PATIENCE)
    assert process.returncode == 0
    assert "without completing response" not in str(complained)


async def test_it_is_healthy_while_an_orchestrator_is() -> None:
    async with running("--orchestrator", "127.0.0.1:1") as (_, address), httpx2.AsyncClient() as client:
        answer = await client.get(f"http://{address}/health")
    assert answer.status_code == 503
    assert answer.json() == {"status": "no orchestrator is available"}


async def test_both_sides_with_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    certificate, key = map(str, authority.issue("front"))
    fake, orchestrator = FakeServer(), grpc.aio.server()
    add_GenerationServiceServicer_to_server(fake, orchestrator)
    files = TlsFiles(*authority.issue("orchestrator"), authority.file)
    port = orchestrator.add_secure_port("127.0.0.1:0", server_credentials(files))
    await orchestrator.start()
    options = ["--orchestrator", f"127.0.0.1:{port}", "--orchestrator-tls-ca", str(authority.file)]
    options += ["--orchestrator-tls-cert", certificate, "--orchestrator-tls-key", key]
    options += ["--tls-cert", certificate, "--tls-key", key]
    trusting = ssl.create_default_context(cafile=str(authority.file))
    async with running(*options) as (_, address):
        http = httpx2.AsyncClient(verify=trusting)
        async with openai.AsyncOpenAI(base_url=f"https://{address}/v1", api_key="key", http_client=http) as client:
            answer = await client.completions.create(model="fake", prompt="def")
    await orchestrator.stop(0)
    assert answer.choices[0].text == TEXT


async def test_the_page_can_be_turned_off() -> None:
    assert inspect.signature(main).parameters["page"].default is True
    async with running("--orchestrator", "127.0.0.1:1", "--no-page") as (_, address), httpx2.AsyncClient() as client:
        assert (await client.get(f"http://{address}/")).status_code == 404


async def test_metrics_are_at_their_port() -> None:
    port = free_port()
    async with (
        FakeServer() as server,
        running("--orchestrator", server.address, "--metrics-port", str(port)) as (_, address),
        httpx2.AsyncClient() as client,
    ):
        await client.get(f"http://{address}/v1/models")
        told = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
    assert 'specdec_openai_requests_total{route="/v1/models",status="200"} 1.0' in told


@pytest.mark.parametrize(
    ("options", "status", "line"),
    [
        (["--orchestrator", "http://x:1"], 2, "'--orchestrator'"),
        (["--host", "192.0.2.1"], 1, "cannot listen there"),
        *(
            pytest.param(*case, marks=pytest.mark.verify)  # each starts a process
            for case in (
                (
                    ["--tls-cert", "/nowhere.pem", "--tls-key", "/nowhere.pem"],
                    1,
                    "--tls-cert /nowhere.pem: No such file",
                ),
                (["--orchestrator-tls-ca", "/nowhere.pem"], 2, "--orchestrator-tls-ca /nowhere.pem: No such file"),
                (["--allow-origin", "https://a.example/"], 2, "'--allow-origin'"),
            )
        ),
    ],
)
async def test_it_says_why_it_cannot_run(options: list[str], status: int, line: str) -> None:
    process = await spawn(*options)
    _, complained = await asyncio.wait_for(process.communicate(), PATIENCE)
    assert process.returncode == status
    assert line in complained.decode()
    assert "Traceback" not in complained.decode()
