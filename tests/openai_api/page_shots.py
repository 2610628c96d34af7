"""`python -m tests.openai_api.page_shots FOLDER` makes the documentation's pictures of the page with the demo pair."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from PIL import Image

from demo.train import HOME
from testing.chromium import page
from tests.openai_api.front import front
from tests.openai_api.test_page_in_browser import IDLE, ask
from tests.stack import stack

PROMPT = "def read_lines(path, encoding):\n"
SETTINGS = "temperature=0.6&seed=4&max_tokens=160&compare=1"


async def main(folder: Path) -> None:
    async with (
        stack(HOME / "target", HOME / "draft") as services,
        front(services.address, with_page=True) as http,
        page() as opened,
    ):
        for name, dark, settings in (("light", False, SETTINGS), ("dark", True, f"{SETTINGS}&rejected=1&forced=1")):
            await opened.look(width=1080, height=880, dark=dark)
            await opened.open(f"http://{http.address}/#{settings}")
            await opened.run(f"document.querySelector('#pods').open = {str(dark).lower()}")
            await ask(opened, PROMPT)
            await opened.until(IDLE)
            await opened.run("document.activeElement.blur(); document.querySelector('#texts').scrollTop = 0")
            file = folder / f"page-{name}.png"
            await opened.screenshot(file)
            Image.open(file).quantize(128).save(file, optimize=True)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
