"""The Python of README and guide runs as it stands on the page, and passes a strict type checker."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

from demo.train import CHAT_TEMPLATE
from tests.services.conftest import Directories
from tests.stack import stack

ROOT = Path(__file__).parents[2]
ADDRESS = "127.0.0.1:50050"
PAGES = ["README.md", "docs/client-guide.md", "docs/structured-output.md"]


def snippets(page: str) -> str:
    """Return the Python of a page as one program: later snippets continue earlier ones."""
    return "\n".join(re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE))


async def run(program: Path) -> bytes:
    process = await asyncio.create_subprocess_exec(sys.executable, program, stdout=-1, stderr=-1, cwd=ROOT)
    said, complained = await asyncio.wait_for(process.communicate(), 60)
    assert (process.returncode, complained.decode()) == (0, "")
    return said


async def test_they_run(directories: Directories, tmp_path: Path) -> None:
    """On a small model with the chat template of the bundled one."""
    target, file = tmp_path / "target", tmp_path / "page.py"
    shutil.copytree(directories.target, target)
    settings = json.loads((target / "tokenizer_config.json").read_text())
    (target / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": CHAT_TEMPLATE}))
    async with stack(target, directories.near) as services:
        for page in PAGES:
            program = snippets(page)
            assert ADDRESS in program
            file.write_text(program.replace(ADDRESS, services.address))
            assert await run(file)


def test_they_are_typed(tmp_path: Path) -> None:
    files = [tmp_path / f"page_{number}.py" for number in range(len(PAGES))]
    for file, page in zip(files, PAGES, strict=True):
        file.write_text(snippets(page))
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports", "silent", "--config-file", ""]
    command += ["--cache-dir", str(tmp_path / "cache"), *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
