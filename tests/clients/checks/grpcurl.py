"""grpcurl: services by reflection, and calls."""

from __future__ import annotations

import json

from tests.clients.checks.uses import PROMPT, TOKENS, equal, said, same_text, server, use

SERVER = server()
SERVICE = "specdec.v2.GenerationService"


def grpcurl(*arguments: str) -> str:
    return said("grpcurl", "-plaintext", *arguments)


@use("services by reflection")
def services() -> None:
    equal(SERVICE in grpcurl(SERVER.orchestrator, "list").split(), True)


@use("models")
def models() -> None:
    answer = json.loads(grpcurl(SERVER.orchestrator, f"{SERVICE}/ListModels"))
    equal([model["name"] for model in answer["models"]], [SERVER.model])


@use("completion")
def completion() -> None:
    asked = json.dumps({"request": {"text": PROMPT, "maxTokens": TOKENS}})
    answer = json.loads(grpcurl("-d", asked, SERVER.orchestrator, f"{SERVICE}/Complete"))
    same_text(answer["completions"][0]["text"], SERVER.completion)
