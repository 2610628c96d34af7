"""opencode: a turn through the AI SDK. Its prompt has almost ten thousand tokens."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.clients.checks.uses import equal, said, server, use

SERVER = server()
FOLDER = Path(os.environ["HOME"]) / "work"
FOLDER.mkdir()
PROVIDER = {
    "npm": "@ai-sdk/openai-compatible",
    "options": {"baseURL": SERVER.base, "apiKey": SERVER.key},
    "models": {SERVER.model: {"limit": {"context": 32768, "output": 64}}},
}
(FOLDER / "opencode.json").write_text(
    json.dumps({"provider": {"here": PROVIDER}, "autoupdate": False, "share": "disabled"})
)


@use("a turn")
def turn() -> None:
    """The turn ends with the model's end token; its text is nonsense, possibly just a line break."""
    os.chdir(FOLDER)
    answer = said("opencode", "run", "--model", f"here/{SERVER.model}", "--format", "json", "Say hello.")
    events = [json.loads(line) for line in answer.splitlines() if line.startswith("{")]
    equal([event["part"]["reason"] for event in events if event["type"] == "step_finish"], ["stop"])
