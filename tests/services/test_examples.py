"""The examples run as a reader would run them, against real services."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from tests.services.conftest import Directories
from tests.stack import stack

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_every_example_is_listed() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    assert all(f"({file.name})" in listed for file in EXAMPLES.glob("*.py"))


@pytest.mark.parametrize("name", sorted(file.name for file in EXAMPLES.glob("*.py")))
async def test_it_runs(directories: Directories, name: str) -> None:
    async with stack(directories.target, directories.near) as services:
        process = await asyncio.create_subprocess_exec(
            sys.executable, EXAMPLES / name, services.address, stdout=-1, stderr=-1
        )
        said, complained = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0, complained.decode()
    assert said.strip()
