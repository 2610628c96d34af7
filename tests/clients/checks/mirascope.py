"""Mirascope: calls by chats and by responses, tools and structured answers."""

from __future__ import annotations

from typing import Any

from mirascope import llm

from tests.clients.checks.uses import QUESTION, TOKENS, joined, same_text, server, use, weather
from tests.clients.checks.weather import Weather

SERVER = server()
SETTINGS: Any = {"temperature": 0, "max_tokens": TOKENS}


def model(api: str = "completions") -> Any:
    """Return a model; its address and key come from the environment."""
    return llm.model(f"openai/{SERVER.model}:{api}", **SETTINGS)


@use("chat")
def chat() -> None:
    same_text(model().call(QUESTION).text(), SERVER.answer)


@use("chat, streamed")
def chat_streamed() -> None:
    joined(list(model().stream(QUESTION).text_stream()), SERVER.answer)


@use("structured output")
def structured_output() -> None:
    weather(model().call(QUESTION, format=llm.format(Weather, mode="strict")).parse())


@use("responses")
def responses() -> None:
    """Mirascope's default API."""
    same_text(model("responses").call(QUESTION).text(), SERVER.answer)
