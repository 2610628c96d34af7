"""Codex CLI: streamed turns over /v1/responses. Its prompt has almost ten thousand tokens.

By default, it offers a namespace of tools for sub-agents, and OpenAI's web search.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from tests.clients.checks.uses import WrongAnswerError, equal, server, use

SERVER = server()
HOME = Path(os.environ["HOME"])
FOLDER = HOME / "work"
FOLDER.mkdir()
(HOME / ".codex").mkdir()
CONFIG = f"""
model = "{SERVER.model}"
model_provider = "here"
check_for_update_on_startup = false

[model_providers.here]
name = "here"
base_url = "{SERVER.base}"
wire_api = "responses"
env_key = "OPENAI_API_KEY"
stream_max_retries = 0
request_max_retries = 0

[analytics]
enabled = false
"""


def turn(more: str) -> None:
    """Run a turn with more settings. The model's text is nonsense, possibly just a line break."""
    (HOME / ".codex" / "config.toml").write_text(more + CONFIG)
    options = ("--json", "--skip-git-repo-check", "--sandbox", "read-only", "--cd", str(FOLDER))
    command = ("codex", "exec", *options, "Say hello.")
    printed = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False).stdout
    print(printed)
    events = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    if failed := [event for event in events if event["type"] == "turn.failed"]:
        raise WrongAnswerError(failed[0]["error"]["message"])
    done = [event for event in events if event["type"] == "turn.completed"]
    equal(len(done), 1)
    equal(done[0]["usage"]["output_tokens"] > 0, True)


@use("a turn without sub-agents and web search")
def local() -> None:
    turn('web_search = "disabled"\nagents.enabled = false\n')


@use("a turn as it is installed")
def as_installed() -> None:
    turn("")
