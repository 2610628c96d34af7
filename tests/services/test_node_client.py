"""The Node client streams, resumes a text at another orchestrator, and reads errors."""

from __future__ import annotations

import asyncio
import json
import shutil
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from google.rpc import code_pb2, error_details_pb2

from orchestrator.models.catalog import Catalog
from orchestrator.servicer import GenerationServicer
from specdec.client import AsyncClient
from specdec.v2 import generation_pb2
from tests.client.fake_server import REASONING, TEXT, Act, FakeServer, rich
from tests.services.conftest import Directories
from tests.stack import long_steps, served, stack

FOLDER = Path(__file__).parents[2] / "examples" / "node"
pytestmark = pytest.mark.skipif(
    shutil.which("node") is None or not (FOLDER / "node_modules" / "@grpc").is_dir(),
    reason="wants node, and npm ci in examples/node",
)


async def start(addresses: str, text: str = "hi", **options: Any) -> Process:
    command = ("node", str(FOLDER / "stream.js"), addresses, text, json.dumps(options))
    return await asyncio.create_subprocess_exec(*command, stdout=-1, stderr=-1)


@asynccontextmanager
async def relayed(to: int) -> AsyncIterator[tuple[int, asyncio.Event]]:
    """Relay a port to `to` until the event is set; later bytes are dropped."""
    broken = asyncio.Event()
    writers: set[asyncio.StreamWriter] = set()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            if not broken.is_set():
                writer.write(data)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", to)
        writers.update((writer, back))
        await asyncio.gather(relay(reader, back), relay(there, writer), return_exceptions=True)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], broken
    finally:
        for writer in writers:
            writer.close()
        server.close()


async def run(addresses: str, text: str = "hi", **options: Any) -> tuple[int | None, str, str]:
    """Return exit status, stdout, stderr."""
    process = await start(addresses, text, **options)
    said, complained = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode, said.decode(), complained.decode()


async def test_it_streams(directories: Directories) -> None:
    async with stack(directories.target, directories.near) as services:
        async with AsyncClient(services.address) as client:
            want = await client.complete("hello there", max_tokens=40, temperature=0.8, seed=5)
        status, said, told = await run(
            services.address, "hello there", max_tokens=40, sampling={"temperature": 0.8, "seed": "5"}
        )
    assert (status, said) == (0, want.text), told
    assert told.strip().startswith(f"{want.completions[0].finish.completion_tokens} tokens in ")


async def test_it_leaves_a_server_that_is_gone_without_a_word() -> None:
    """Nothing that the server sends arrives, and no connection closes."""
    script = """
        import { Client } from "./client.js";
        const usual = new Client(["127.0.0.1:1"]).channelOptions;
        const channelOptions = { "grpc.keepalive_time_ms": 1000, "grpc.keepalive_timeout_ms": 2000 };
        const client = new Client(process.argv.slice(1), { channelOptions });
        let text = "";
        const chat = { messages: [{ role: "user", content: "hi" }] };
        for await (const response of client.generate({ chat })) text += response.text;
        client.close();
        console.log(JSON.stringify({ usual, text }));
    """
    async with FakeServer(Act(6, "hold")) as one, FakeServer() as other, relayed(one.port) as (port, broken):
        process = await asyncio.create_subprocess_exec(
            *("node", "--input-type=module", "-e", script, f"127.0.0.1:{port}", other.address),
            cwd=FOLDER,
            stdout=-1,
            stderr=-1,
        )
        await asyncio.wait_for(one.held.wait(), 60)
        broken.set()
        said, told = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, told
    assert json.loads(said) == {
        "usual": {"grpc.keepalive_time_ms": 20_000, "grpc.keepalive_timeout_ms": 10_000},
        "text": TEXT,
    }
    (call,) = other.calls
    assert call.request.generated_tokens
    assert call.request.reasoning == REASONING


async def test_it_goes_on_in_the_middle_of_a_character() -> None:
    breaking = Act(tokens=4, then="abort")
    async with FakeServer(breaking, breaking) as one, FakeServer(breaking) as other:
        status, said, told = await run(f"{one.address},{other.address}")
    assert (status, said) == (0, TEXT), told
    requests = [call.request for call in (*one.calls, *other.calls)]
    assert {request.sampling.seed for request in requests if request.generated_tokens} == {1001}


async def test_a_begun_text_leaves_a_server_without_its_revision() -> None:
    unknown = rich(code_pb2.NOT_FOUND, error_details_pb2.ErrorInfo(reason="UNKNOWN_MODEL"))
    async with FakeServer(Act(tokens=4, then="abort"), Act()) as one, FakeServer(unknown) as other:
        status, said, told = await run(f"{one.address},{other.address}")
        assert (status, said, len(other.calls)) == (0, TEXT, 1), told
    async with FakeServer(unknown) as server:
        assert (await run(server.address))[0] == 1


async def test_a_killed_orchestrator_changes_no_token(directories: Directories) -> None:
    """Two orchestrators share the pods; the one in use is killed while streaming."""
    async with stack(directories.target, directories.near, target_delay=long_steps) as services:
        async with AsyncClient(services.address) as client:
            want = await client.complete("hello", max_tokens=200, temperature=0.8, seed=5, ignore_end_token=True)
        async with served(GenerationServicer(Catalog.of(services.model, services.peers))) as (address, server):
            process = await start(
                f"{address},{services.address}",
                "hello",
                max_tokens=200,
                ignore_end_token=True,
                sampling={"temperature": 0.8, "seed": "5"},
            )
            assert process.stdout is not None
            first = await asyncio.wait_for(process.stdout.read(1), 60)
            await server.stop(0)
            said, told = await asyncio.wait_for(process.communicate(), 60)
        stats = await services.stub.GetStats(generation_pb2.GenerationServiceGetStatsRequest())
    assert process.returncode == 0, told
    assert stats.requests == 2  # the reference, and the rest of the interrupted text
    assert (first + said).decode() == want.text


async def test_it_tells_what_is_wrong(directories: Directories) -> None:
    async with stack(directories.target, None) as services:
        status, _, told = await run(services.address, sampling={"temperature": -1})
    assert status == 1
    assert told.startswith("INVALID_ARGUMENT INVALID_REQUEST: sampling.temperature: is -1, must be")


@pytest.mark.verify
async def test_it_gives_up_where_nobody_answers() -> None:
    status, _, told = await run("127.0.0.1:1")
    assert status == 1
    assert told.startswith("UNAVAILABLE")
