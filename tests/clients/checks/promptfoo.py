"""promptfoo: an evaluation through its providers for chats, completions and responses."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.clients.checks.uses import PROMPT, QUESTION, TOKENS, said, same_text, server, use

SERVER = server()
FOLDER = Path(os.environ["HOME"])
os.environ |= {"PROMPTFOO_DISABLE_TELEMETRY": "1", "PROMPTFOO_DISABLE_UPDATE": "1"}


def output(kind: str, prompt: str) -> Any:
    """Return the output of a provider for a prompt."""
    settings = {"apiBaseUrl": SERVER.base, "apiKey": SERVER.key, "temperature": 0, "max_tokens": TOKENS}
    provider = {"id": f"openai:{kind}:{SERVER.model}", "config": settings | {"max_output_tokens": TOKENS}}
    file, out = FOLDER / f"{kind}.json", FOLDER / f"{kind}-out.json"
    file.write_text(json.dumps({"prompts": [prompt], "providers": [provider], "tests": [{"vars": {"none": ""}}]}))
    said("promptfoo", "eval", "--no-cache", "-c", file, "-o", out)
    (result,) = json.loads(out.read_text())["results"]["results"]
    return result["response"]["output"]


@use("chat")
def chat() -> None:
    same_text(output("chat", QUESTION), SERVER.answer)


@use("completion")
def completion() -> None:
    same_text(output("completion", PROMPT), SERVER.completion)


@use("responses")
def responses() -> None:
    same_text(output("responses", QUESTION), SERVER.answer)
