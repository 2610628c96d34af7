"""A verifier with vLLM as its engine: a process of another environment, which `make vllm` makes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from specdec.roles import environment

PYTHON = Path(os.environ.get("SPECDEC_VLLM_PYTHON", "build/vllm/bin/python")).absolute()
"""The interpreter that has vLLM."""

needs_vllm = pytest.mark.skipif(
    not (PYTHON.parents[1] / ".specdec").is_file(), reason="there is no environment with vLLM (make vllm)"
)

START_SECONDS = 180.0


class VllmPod:
    """A verifier that runs."""

    def __init__(self, process: asyncio.subprocess.Process, address: str, log: Path) -> None:
        self.address = address
        self.log = log
        self._process = process

    def kill(self) -> None:
        self._process.kill()

    async def terminate(self) -> int:
        """Have it drain; its exit status."""
        self._process.terminate()
        async with asyncio.timeout(60):
            return await self._process.wait()


async def command(*options: str) -> tuple[int, str]:
    """The exit status of a verifier with these options that does not start, and what it says."""
    process = await asyncio.create_subprocess_exec(
        *map(str, (PYTHON, "-m", "verifier_service", "--engine", "vllm")),
        *options,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env=environment(),
    )
    async with asyncio.timeout(START_SECONDS):
        _, said = await process.communicate()
    assert process.returncode is not None
    return process.returncode, said.decode()


@asynccontextmanager
async def vllm_pod(model: Path, log: Path, *options: str) -> AsyncIterator[VllmPod]:
    """A verifier that serves a model, with one thread and float32."""
    served = ("--model", str(model), "--dtype", "float32", "--threads", "1", "--kv-tokens", "8192")
    with log.open("w") as stderr:
        process = await asyncio.create_subprocess_exec(
            *(PYTHON, "-m", "verifier_service", "--engine", "vllm", "--port", "0", "--stop-with-stdin"),
            *served,
            *options,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
            env={**environment(), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"},
        )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(START_SECONDS):
            said = (await process.stdout.readline()).decode().split()
        assert said[:1] == ["ready"], f"it did not start: {log}"
        yield VllmPod(process, said[1], log)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
