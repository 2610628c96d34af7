"""Texts that a draft may learn from, by way of all services: kept with consent alone, given to who has the key."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from draft_service.traffic import Traffic
from specdec.engine.learned_from import LEARNED_FROM, LearnedFrom, tenant_digest
from specdec.engine.model_directory import COMPLETE
from specdec.exit_status import ExitStatus
from specdec.local import DEMO
from specdec.local.child import Child, stop
from specdec.v2 import draft_pb2, draft_pb2_grpc, learning_pb2, learning_pb2_grpc
from tests.services.conftest import Directories
from tests.stack import ALWAYS, Stack, long_steps, stack, until

KEY = "a key of sixteen or more"
PROMPT, OTHER = [5, 6, 7, 8], [9, 10, 11, 12]


async def kept(services: Stack, key: str = KEY) -> list[learning_pb2.KeptText]:
    async with grpc.aio.insecure_channel(services.drafts[0].address) as channel:
        stub: Any = learning_pb2_grpc.LearningServiceStub(channel)
        call = stub.GetTraffic(learning_pb2.GetTrafficRequest(), metadata=(("authorization", f"Bearer {key}"),))
        return [text async for message in call for text in message.texts]


async def run(*command: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)


async def test_consent_decides_what_is_kept(directories: Directories, tmp_path: Path) -> None:
    async with stack(directories.target, directories.near, traffic=Traffic(10_000), learning_key=KEY) as services:
        yes = await services.generate(PROMPT, max_tokens=12, speculation=ALWAYS, tenant="a", learn=True)
        no = await services.generate(OTHER, max_tokens=12, speculation=ALWAYS, tenant="b")
        assert (yes.finish.kept_for_learning, no.finish.kept_for_learning) == (True, False)
        await until(lambda: services.draft_slots_used == 0)
        (text,) = await kept(services)
        assert list(text.tokens)[: len(PROMPT) + 8] == [*PROMPT, *yes.tokens][: len(PROMPT) + 8]
        assert text.prompt_tokens == len(PROMPT)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await kept(services, "another key")
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        (tmp_path / "key").write_text(KEY)
        command = (sys.executable, "-m", "specdec.cli", "forget", "a", "--draft", services.drafts[0].address)
        done = await run(*command, "--api-key-file", str(tmp_path / "key"))
        assert done.stdout == f"{services.drafts[0].address}: 1 texts, {len(text.tokens)} tokens forgotten\n"
        assert await kept(services) == []
        done = await run(*command)
        assert done.returncode == ExitStatus.REFUSED
        assert "it may keep the texts still" in done.stderr


@asynccontextmanager
async def drafting(*options: str) -> AsyncIterator[str]:
    """Run a draft service in a process of its own; yield its address."""
    child = Child.start("draft", "-m", "draft_service", "--model", str(DEMO / "draft"), "--port", "0", *options)
    try:
        async with asyncio.timeout(300):
            while (address := child.ready_at()) is None:
                await asyncio.sleep(0.1)
        yield address
    finally:
        stop([child])


async def state_of(address: str, version: str, *awaited: draft_pb2.DraftVersionState.ValueType) -> int:
    """Wait until a version is in one of these states, and return it."""
    async with grpc.aio.insecure_channel(address) as channel, asyncio.timeout(300):
        stub: Any = draft_pb2_grpc.DraftServiceStub(channel)
        while True:
            told = await stub.GetStats(draft_pb2.DraftServiceGetStatsRequest())
            for found in told.versions:
                if found.name == version and found.state in awaited:
                    state: int = found.state
                    return state
            await asyncio.sleep(0.1)


async def test_versions_of_a_forgotten_tenant_are_refused_also_after_a_restart(tmp_path: Path) -> None:
    (folder := tmp_path / "versions").mkdir()
    (tmp_path / "key").write_text(KEY)

    def add(name: str, tenant: str) -> None:
        shutil.copytree(DEMO / "draft", folder / f".{name}")
        learned_from = LearnedFrom().with_texts({tenant_digest(tenant): time.time() - 1000.0})
        (folder / f".{name}" / LEARNED_FROM).write_text(json.dumps(learned_from.content))
        (folder / f".{name}" / COMPLETE).touch()
        (folder / f".{name}").rename(folder / name)

    options = ["--engine", "eager", "--threads", "1", "--kv-tokens", "4096", "--canary-slowdown", "50"]
    options += ["--versions", str(folder), "--learn-key-file", str(tmp_path / "key")]
    forgotten, canary = draft_pb2.DRAFT_VERSION_STATE_FORGOTTEN, draft_pb2.DRAFT_VERSION_STATE_CANARY
    async with drafting(*options) as address:
        add("v1", "acme")
        assert await state_of(address, "v1", forgotten, canary) == canary
        command = (sys.executable, "-m", "specdec.cli", "forget", "acme", "--draft", address)
        done = await run(*command, "--api-key-file", str(tmp_path / "key"))
        assert done.stdout == f"{address}: 0 texts, 0 tokens forgotten; rolled back: v1\n"
        assert await state_of(address, "v1", forgotten, canary) == forgotten
    async with drafting(*options) as address:
        assert await state_of(address, "v1", forgotten, canary) == forgotten
        add("v2", "acme")
        add("v3", "other")
        assert await state_of(address, "v2", forgotten, canary) == forgotten
        assert await state_of(address, "v3", forgotten, canary) == canary


async def test_a_draft_that_keeps_nothing_says_so(directories: Directories) -> None:
    async with stack(directories.target, directories.near, target_delay=long_steps) as services:
        told = await services.generate(PROMPT, max_tokens=24, speculation=ALWAYS, learn=True)
        assert told.finish.speculation.sources["remote_draft"]
        assert not told.finish.kept_for_learning
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await kept(services)
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
