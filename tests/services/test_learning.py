"""Texts that a draft may learn from, by way of all services: kept with consent alone, given to who has the key."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest

from draft_service.traffic import Traffic
from specdec.exit_status import ExitStatus
from specdec.v2 import learning_pb2, learning_pb2_grpc
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


async def test_a_draft_that_keeps_nothing_says_so(directories: Directories) -> None:
    async with stack(directories.target, directories.near, target_delay=long_steps) as services:
        told = await services.generate(PROMPT, max_tokens=24, speculation=ALWAYS, learn=True)
        assert told.finish.speculation.sources["remote_draft"]
        assert not told.finish.kept_for_learning
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await kept(services)
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
