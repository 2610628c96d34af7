"""Disturbances of a cluster: load, and misconfigured or slow pods."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import openai

from specdec.client import AsyncClient
from specdec.client.errors import SpecdecError
from tests.faults.cluster import Models
from tests.faults.pods import Pod


@contextlib.asynccontextmanager
async def asking(client: AsyncClient, count: int, tokens: int) -> AsyncIterator[None]:
    """Run `count` clients in a loop, every other one with forced drafting; errors are expected."""

    async def ask(number: int) -> None:
        seed = 0
        while True:
            seed += 1
            try:
                await client.complete(
                    f"text {number}",
                    max_tokens=tokens,
                    ignore_end_token=True,
                    seed=seed,
                    speculation="always" if number % 2 else "auto",
                )
            except SpecdecError:
                await asyncio.sleep(0.1)

    tasks = [asyncio.create_task(ask(number)) for number in range(count)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


@contextlib.asynccontextmanager
async def asking_by_http(address: str) -> AsyncIterator[None]:
    """Ask an HTTP server for short texts, one after another; errors are expected."""

    async def ask() -> None:
        async with openai.AsyncOpenAI(base_url=f"http://{address}/v1", api_key="any", max_retries=0) as client:
            while True:
                with contextlib.suppress(openai.APIError):
                    await client.completions.create(model="", prompt="text", max_tokens=4)
                await asyncio.sleep(0.1)

    task = asyncio.create_task(ask())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


def foreign(models: Models, folder: Path) -> Path:
    """Return a copy of the draft with another tokenizer."""
    shutil.copytree(models.draft, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["added_tokens"][0]["content"] = "<other>"
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


@contextlib.asynccontextmanager
async def stuttering(pod: Pod) -> AsyncIterator[None]:
    """Freeze a pod for most of each second: steps take long, but no peer considers the pod lost."""

    async def stutter() -> None:
        while True:
            pod.freeze()
            await asyncio.sleep(0.7)
            pod.thaw()
            await asyncio.sleep(0.05)

    task = asyncio.create_task(stutter())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
        pod.thaw()
