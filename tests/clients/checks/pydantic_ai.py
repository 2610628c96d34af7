"""Pydantic AI: its models for chats, responses and messages."""

from __future__ import annotations

from typing import Any, Literal

from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.clients.checks.uses import QUESTION, TOKENS, joined, same_text, server, use, weather
from tests.clients.checks.weather import Weather

SERVER = server()
PROVIDER = OpenAIProvider(base_url=SERVER.base, api_key=SERVER.key)
SETTINGS: Any = {"temperature": 0, "max_tokens": TOKENS}
chat_model = OpenAIChatModel(SERVER.model, provider=PROVIDER)


@use("chat")
def chat() -> None:
    same_text(Agent(chat_model, model_settings=SETTINGS).run_sync(QUESTION).output, SERVER.answer)


@use("chat, streamed")
async def chat_streamed() -> None:
    agent = Agent(OpenAIChatModel(SERVER.model, provider=PROVIDER), model_settings=SETTINGS)
    async with agent.run_stream(QUESTION) as stream:
        joined([piece async for piece in stream.stream_text(delta=True, debounce_by=None)], SERVER.answer)


@use("structured output by a tool")
def by_tool() -> None:
    weather(Agent(chat_model, output_type=ToolOutput(Weather), model_settings=SETTINGS).run_sync(QUESTION).output)


@use("structured output beside a tool")
def beside_tool() -> None:
    """The model may call the tool or answer by the schema, but must not get stuck."""
    agent = Agent(chat_model, output_type=NativeOutput(Weather), model_settings=SETTINGS)

    @agent.tool_plain
    def get_weather(city: Literal["Paris", "Rome"]) -> str:
        """Return the weather in a city."""
        return f"It is warm in {city}."

    weather(agent.run_sync(QUESTION).output)


@use("responses")
def responses() -> None:
    agent = Agent(OpenAIResponsesModel(SERVER.model, provider=PROVIDER), model_settings=SETTINGS)
    same_text(agent.run_sync(QUESTION).output, SERVER.answer)


@use("default model class of openai:NAME")
def by_name() -> None:
    """This class takes address and key from the environment, and calls /v1/responses."""
    same_text(Agent(f"openai:{SERVER.model}", model_settings=SETTINGS).run_sync(QUESTION).output, SERVER.answer)
