"""LiteLLM's proxy in front of the server, used by OpenAI's client."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai

from tests.clients.checks.uses import OPENAI_TOOL, QUESTION, TOKENS, called, joined, same_text, server, use

SERVER = server()
START_SECONDS = 90.0
MASTER_KEY = f"sk-{secrets.token_hex(16)}"
"""The proxy does not start without a master key."""
os.environ["LITELLM_MASTER_KEY"] = MASTER_KEY
CHAT: Any = {"model": "proxied", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": TOKENS}


@contextlib.contextmanager
def proxy() -> Iterator[Any]:
    """Yield a client of a running proxy."""
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    model = {"model": f"openai/{SERVER.model}", "api_base": SERVER.base, "api_key": SERVER.key}
    settings = {"model_list": [{"model_name": "proxied", "litellm_params": model}]}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "config.yaml")
        file.write_text(json.dumps(settings))  # JSON is YAML
        process = subprocess.Popen(["litellm", "--config", file, "--host", "127.0.0.1", "--port", str(port)])
        try:
            deadline = time.monotonic() + START_SECONDS
            while not _answers(f"http://127.0.0.1:{port}/health/liveliness"):
                if time.monotonic() > deadline or process.poll() is not None:
                    raise TimeoutError("the proxy did not start")
                time.sleep(0.2)
            yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=MASTER_KEY, max_retries=0)
        finally:
            process.kill()
            process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@use("chat, streams, tools, responses")
def everything() -> None:
    """All uses share one proxy, since it takes long to start."""
    with proxy() as client:
        same_text(client.chat.completions.create(**CHAT).choices[0].message.content, SERVER.answer)
        events = client.chat.completions.create(**CHAT, stream=True)
        joined([event.choices[0].delta.content for event in events if event.choices], SERVER.answer)
        answer = client.chat.completions.create(**CHAT, tools=[OPENAI_TOOL], tool_choice="required")
        (call,) = answer.choices[0].message.tool_calls
        called(call.function.name, call.function.arguments)
        same_text(client.responses.create(model="proxied", input=QUESTION).output_text, SERVER.answer)
