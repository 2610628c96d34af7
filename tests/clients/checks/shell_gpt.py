"""The command `sgpt`."""

from __future__ import annotations

import os
from pathlib import Path

from tests.clients.checks.uses import QUESTION, said, server, some_text, use

SERVER = server()
FOLDER = Path(os.environ["HOME"]) / ".config" / "shell_gpt"
FOLDER.mkdir(parents=True)
(FOLDER / ".sgptrc").write_text(
    f"DEFAULT_MODEL={SERVER.model}\nAPI_BASE_URL={SERVER.base}\nOPENAI_API_KEY={SERVER.key}\nUSE_LITELLM=false\n"
    "OPENAI_USE_FUNCTIONS=false\nDISABLE_STREAMING=false\nPRETTIFY_MARKDOWN=false\n"
)


@use("chat, streamed")
def chat() -> None:
    """`sgpt` adds its own system message, so the answer is not known."""
    some_text(said("sgpt", "--no-cache", "--temperature", "0", QUESTION))
