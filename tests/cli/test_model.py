"""`--model` selects one of several served models."""

from __future__ import annotations

import asyncio
import sys

import pytest

from tests.client.fake_server import FakeServer


@pytest.mark.parametrize("arguments", [("generate", "hi"), ("tokenize", "hi"), ("chat",)], ids=lambda given: given[0])
async def test_a_command_names_it(arguments: tuple[str, ...]) -> None:
    async with FakeServer() as server:
        command = (sys.executable, "-m", "specdec.cli", *arguments, "--address", server.address, "--model", "m@a")
        process = await asyncio.create_subprocess_exec(*command, stdin=-1, stdout=-1, stderr=-1)
        _, complained = await asyncio.wait_for(process.communicate(b"hi\n"), 60)
        assert process.returncode == 0, complained.decode()
        assert [call.request.model for call in server.calls] == ["m@a"]
