"""Claude Code: a streamed turn over /v1/messages, with a short system prompt and no tools."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.clients.checks.uses import equal, said, server, some_text, use

SERVER = server()
os.environ |= {"ANTHROPIC_SMALL_FAST_MODEL": SERVER.model, "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
FOLDER = Path(os.environ["HOME"]) / "work"
FOLDER.mkdir()


@use("a turn")
def turn() -> None:
    os.chdir(FOLDER)
    options = ("--output-format", "json", "--system-prompt", "Be brief.", "--tools", "", "--model", SERVER.model)
    answer = said(
        *("claude", "--print", *options, "Say hello."),
    )
    result = json.loads(answer.splitlines()[-1])
    equal(result["is_error"], False)
    some_text(result["result"])
