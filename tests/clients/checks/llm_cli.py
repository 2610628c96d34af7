"""The command `llm`: chats, streams, completions, schemas and tools, with a model from its configuration file."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.clients.checks.uses import (
    CITIES,
    PROMPT,
    QUESTION,
    TOKENS,
    WEATHER,
    equal,
    said,
    same_text,
    server,
    use,
    weather,
)

SERVER = server()
PROGRAM = "llm"
FOLDER = Path(os.environ["HOME"]) / "llm"
FOLDER.mkdir()
os.environ["LLM_USER_PATH"] = str(FOLDER)
MODEL = {"model_name": SERVER.model, "api_base": SERVER.base, "supports_schema": True, "supports_tools": True}
MODELS = [MODEL | {"model_id": "chat"}, MODEL | {"model_id": "text", "completion": True}]
(FOLDER / "extra-openai-models.yaml").write_text(json.dumps(MODELS))  # JSON is YAML


def llm(model: str, *arguments: str) -> str:
    """Run the command and return its stdout."""
    options = ("--no-log", "-m", model, "--key", SERVER.key, "-o", "temperature", "0", "-o", "max_tokens", str(TOKENS))
    return said(PROGRAM, "prompt", *options, *arguments)


@use("chat")
def chat() -> None:
    same_text(llm("chat", "--no-stream", QUESTION), SERVER.answer)


@use("chat, streamed")
def chat_streamed() -> None:
    same_text(llm("chat", QUESTION), SERVER.answer)


@use("completion")
def completion() -> None:
    same_text(llm("text", PROMPT), SERVER.completion)


@use("JSON schema")
def json_schema() -> None:
    weather(llm("chat", "--no-stream", "--schema", json.dumps(WEATHER), QUESTION))


@use("a tool is offered")
def tools() -> None:
    """The model need not call the tool."""
    function = (
        f'def get_weather(city: str) -> str:\n    """Weather in {CITIES[0]} or {CITIES[1]}."""\n    return "warm"'
    )
    equal(isinstance(llm("chat", "--no-stream", "--functions", function, QUESTION), str), True)
