"""grpc-requests: calls by reflection."""

from __future__ import annotations

from grpc_requests import Client

from tests.clients.checks.uses import PROMPT, TOKENS, equal, same_text, server, use

SERVER = server()
SERVICE = "specdec.v2.GenerationService"


@use("services by reflection")
def services() -> None:
    equal(SERVICE in Client.get_by_endpoint(SERVER.orchestrator).service_names, True)


@use("completion")
def completion() -> None:
    client = Client.get_by_endpoint(SERVER.orchestrator)
    answer = client.request(SERVICE, "Complete", {"request": {"text": PROMPT, "max_tokens": TOKENS}})
    same_text(answer["completions"][0]["text"], SERVER.completion)
