"""buf curl: methods by reflection, and a call."""

from __future__ import annotations

import json

from tests.clients.checks.uses import PROMPT, TOKENS, equal, said, same_text, server, use

SERVER = server()
SERVICE = "specdec.v2.GenerationService"


def curl(*arguments: str) -> str:
    return said("buf", "curl", "--protocol", "grpc", "--http2-prior-knowledge", *arguments)


@use("methods by reflection")
def methods() -> None:
    equal(f"{SERVICE}/Complete" in curl("--list-methods", f"http://{SERVER.orchestrator}").split(), True)


@use("completion")
def completion() -> None:
    asked = json.dumps({"request": {"text": PROMPT, "maxTokens": TOKENS}})
    answer = json.loads(curl("--data", asked, f"http://{SERVER.orchestrator}/{SERVICE}/Complete"))
    same_text(answer["completions"][0]["text"], SERVER.completion)
