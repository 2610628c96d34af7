"""Continue's command line `cn`: a turn with its tools, streamed."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.clients.checks.uses import said, server, some_text, use

SERVER = server()
os.environ["CONTINUE_TELEMETRY_ENABLED"] = "0"
FOLDER = Path(os.environ["HOME"]) / "work"
FOLDER.mkdir()
MODEL = {
    "name": "here",
    "provider": "openai",
    "model": SERVER.model,
    "apiBase": SERVER.base,
    "apiKey": SERVER.key,
    "roles": ["chat"],
    "contextLength": 32768,
    "defaultCompletionOptions": {"maxTokens": 64},
}
(FOLDER / "config.yaml").write_text(
    json.dumps({"name": "here", "version": "1.0.0", "schema": "v1", "models": [MODEL]})  # JSON is YAML
)


@use("a turn")
def turn() -> None:
    os.chdir(FOLDER)
    options = ("--config", "config.yaml", "--readonly", "-p")
    some_text(said("cn", *options, "Say hello."))
