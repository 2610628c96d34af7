"""OpenAI's Agents SDK."""

from __future__ import annotations

from typing import Any, Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

from tests.clients.checks.uses import QUESTION, TOKENS, equal, same_text, server, use, weather
from tests.clients.checks.weather import Weather

SERVER = server()
SETTINGS: Any = {"temperature": 0, "max_tokens": TOKENS}
set_tracing_disabled(True)


CALLS: list[str] = []


@function_tool
def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """Return the weather in a city."""
    CALLS.append(city)
    return f"It is warm in {city}."


def model(kind: Any) -> Any:
    return kind(SERVER.model, AsyncOpenAI(base_url=SERVER.base, api_key=SERVER.key, max_retries=0))


async def answer(kind: Any, **options: Any) -> Any:
    settings = ModelSettings(**SETTINGS, **options.pop("settings", {}))
    agent = Agent(name="a", model=model(kind), model_settings=settings, **options)
    return (await Runner.run(agent, QUESTION, max_turns=4)).final_output


@use("responses")
async def responses() -> None:
    """The SDK's default API."""
    same_text(await answer(OpenAIResponsesModel), SERVER.answer)


@use("chat")
async def chat() -> None:
    same_text(await answer(OpenAIChatCompletionsModel), SERVER.answer)


@use("streamed")
async def streamed() -> None:
    agent = Agent(name="a", model=model(OpenAIResponsesModel), model_settings=ModelSettings(**SETTINGS))
    run = Runner.run_streamed(agent, QUESTION, max_turns=2)
    kinds = {event.type async for event in run.stream_events()}
    equal("raw_response_event" in kinds, True)
    same_text(run.final_output, SERVER.answer)


@use("tools")
async def tools() -> None:
    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        CALLS.clear()
        settings = {"tool_choice": "required"}
        await answer(kind, tools=[get_weather], settings=settings, tool_use_behavior="stop_on_first_tool")
        equal(bool(CALLS), True)


@use("answer schema beside tools")
async def schema_beside_tools() -> None:
    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        weather(await answer(kind, tools=[get_weather], output_type=Weather))
