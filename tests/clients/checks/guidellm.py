"""GuideLLM: loads of ten streamed requests."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.clients.checks.uses import equal, said, server, use

SERVER = server()
REQUESTS = 10


def load(route: str) -> None:
    """Run a load. It exits with status 0 even if all requests fail, so its report is read."""
    out = Path(os.environ["HOME"], f"{route.replace('/', '-')}.json")
    backend = {
        "kind": "openai_http",
        "target": SERVER.url,
        "model": SERVER.model,
        "api_key": SERVER.key,
        "request_format": route,
    }
    said(
        *("guidellm", "run", "--backend", json.dumps(backend), "--disable-console"),
        *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16"),
        *("--tokenizer", f"kind=huggingface_auto,model={SERVER.tokenizer}"),
        *("--profile", "kind=concurrent,streams=2", "--constraint", f"kind=max_requests,count={REQUESTS}"),
        *("--output", f"kind=json,path={out}"),
    )
    totals = json.loads(out.read_text())["benchmarks"][0]["metrics"]["request_totals"]
    equal((totals["successful"], totals["errored"]), (REQUESTS, 0))


@use("chats, streamed")
def chats() -> None:
    load("/v1/chat/completions")


@use("completions, streamed")
def completions() -> None:
    load("/v1/completions")
