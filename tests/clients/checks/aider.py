"""Aider: a question about a file in a repository, without an edit."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.clients.checks.uses import equal, said, server, some_text, use

SERVER = server()
FOLDER = Path(os.environ["HOME"]) / "repository"
OFF = ("--no-check-update", "--no-analytics", "--no-show-release-notes", "--no-detect-urls", "--no-show-model-warnings")


@use("a turn of its chat")
def turn() -> None:
    FOLDER.mkdir()
    subprocess.run(["git", "init", "--quiet", FOLDER], check=True)
    (FOLDER / "main.py").write_text("def main():\n    pass\n")
    os.chdir(FOLDER)
    answer = said(
        *("aider", "--model", f"openai/{SERVER.model}", "--chat-mode", "ask"),
        *("--openai-api-base", SERVER.base, "--openai-api-key", SERVER.key, "--map-tokens", "0", "--yes-always"),
        *(*OFF, "--no-pretty", "--no-git", "--message", "What does main do?", "main.py"),
    )
    some_text(answer)
    equal("litellm." in answer, False)  # aider prints errors in the chat, and exits with status 0
    equal((FOLDER / "main.py").read_text(), "def main():\n    pass\n")
