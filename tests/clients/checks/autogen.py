"""AutoGen: its model client and an assistant with a tool."""

from __future__ import annotations

from typing import Any, Literal

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import UserMessage
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient

from tests.clients.checks.uses import QUESTION, TOKENS, called, joined, same_text, server, some_text, use, weather
from tests.clients.checks.weather import Weather

SERVER = server()
INFO: Any = {
    "vision": False,
    "function_calling": True,
    "json_output": True,
    "structured_output": True,
    "family": "unknown",
}
MESSAGES = [UserMessage(content=QUESTION, source="user")]


def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """Return the weather in a city."""
    return f"It is warm in {city}."


def client() -> Any:
    return OpenAIChatCompletionClient(
        model=SERVER.model,
        base_url=SERVER.base,
        api_key=SERVER.key,
        model_info=INFO,
        max_tokens=TOKENS,
        temperature=0,
        include_name_in_message=False,
    )


@use("chat")
async def chat() -> None:
    same_text((await client().create(MESSAGES)).content, SERVER.answer)


@use("chat, streamed")
async def chat_streamed() -> None:
    joined([piece async for piece in client().create_stream(MESSAGES) if isinstance(piece, str)], SERVER.answer)


@use("structured output")
async def structured_output() -> None:
    weather((await client().create(MESSAGES, json_output=Weather)).content)


@use("tools")
async def tools() -> None:
    tool = FunctionTool(get_weather, description="Return the weather in a city.", strict=True)
    answer = await client().create(MESSAGES, tools=[tool], tool_choice="required")
    (call,) = answer.content
    called(call.name, call.arguments)


@use("assistant with a tool")
async def assistant() -> None:
    made = AssistantAgent("a", model_client=client(), tools=[get_weather])
    some_text((await made.run(task=QUESTION)).messages[-1].to_text())
