"""LangChain with its integration for OpenAI."""

from __future__ import annotations

from typing import Any, Literal

from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI

from tests.clients.checks.uses import PROMPT, QUESTION, TOKENS, called, equal, joined, same_text, server, use, weather
from tests.clients.checks.weather import Weather

SERVER = server()
WHERE: Any = {"base_url": SERVER.base, "api_key": SERVER.key, "model": SERVER.model, "max_retries": 0}
chat_model = ChatOpenAI(**WHERE, temperature=0, max_tokens=TOKENS)


@tool
def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """Return the weather in a city."""
    return f"It is warm in {city}."


@use("chat")
def chat() -> None:
    same_text(chat_model.invoke(QUESTION).content, SERVER.answer)


@use("chat, streamed")
def chat_streamed() -> None:
    joined([chunk.content for chunk in chat_model.stream(QUESTION)], SERVER.answer)


@use("batch")
def batch() -> None:
    for answer in chat_model.batch([QUESTION] * 3):
        same_text(answer.content, SERVER.answer)


@use("completion")
def completion() -> None:
    same_text(OpenAI(**WHERE, temperature=0, max_tokens=TOKENS).invoke(PROMPT), SERVER.completion)


@use("tools")
def tools() -> None:
    (call,) = chat_model.bind_tools([get_weather], tool_choice="any").invoke(QUESTION).tool_calls
    called(call["name"], call["args"])


@use("structured output")
def structured_output() -> None:
    for method in ("json_schema", "function_calling"):
        weather(chat_model.with_structured_output(Weather, method=method).invoke(QUESTION))


@use("responses")
def responses() -> None:
    model = ChatOpenAI(**WHERE, temperature=0, max_tokens=TOKENS, use_responses_api=True)
    same_text(model.invoke(QUESTION).text, SERVER.answer)


@use("agent with tools and an answer schema")
def agent() -> None:
    made = create_agent(chat_model, tools=[get_weather], response_format=ProviderStrategy(Weather))
    turns = made.invoke({"messages": [("user", QUESTION)]}, {"recursion_limit": 6})
    weather(turns["structured_response"])


@use("token usage")
def usage() -> None:
    used = chat_model.invoke(QUESTION).usage_metadata
    equal(used is not None and used["output_tokens"] > 0, True)
