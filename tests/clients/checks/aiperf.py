"""AIPerf: a load of ten streamed requests, with usage in every chunk."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.clients.checks.uses import equal, said, server, use

os.environ.pop("HF_HUB_OFFLINE", None)  # with it, AIPerf takes the tokenizer's folder for a name on the hub
SERVER = server()
FOLDER = Path(os.environ["HOME"])
REQUESTS = 10


def load(kind: str, *more: str) -> None:
    out = FOLDER / f"{kind}{len(more)}"
    said(
        *("aiperf", "profile", "--model", SERVER.model, "--url", SERVER.url),
        *("--endpoint-type", kind, "--streaming", "--tokenizer", SERVER.tokenizer, "--api-key", SERVER.key),
        *("--request-count", str(REQUESTS), "--concurrency", "2", "--synthetic-input-tokens-mean", "32"),
        *("--output-tokens-mean", "16", "--extra-inputs", "ignore_eos:true", "--artifact-dir", out, "--ui", "none"),
        *more,
    )
    (file,) = out.rglob("profile_export_aiperf.json")
    report = json.loads(file.read_text())
    equal((report["request_count"]["avg"], report.get("error_request_count")), (REQUESTS, None))


@use("chats, streamed")
def chats() -> None:
    load("chat")


@use("completions, streamed")
def completions() -> None:
    load("completions")


@use("usage in every chunk")
def usage() -> None:
    load("chat", "--per-chunk-usage", "--use-server-token-count")
