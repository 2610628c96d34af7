"""smolagents: its model for OpenAI's API, and an agent that calls tools."""

from __future__ import annotations

from typing import Any

from smolagents import OpenAIServerModel, ToolCallingAgent, tool

from tests.clients.checks.uses import CITIES, QUESTION, TOKENS, equal, joined, same_text, server, use

SERVER = server()
WHERE: Any = {"model_id": SERVER.model, "api_base": SERVER.base, "api_key": SERVER.key, "temperature": 0}
model = OpenAIServerModel(**WHERE, max_tokens=TOKENS)
MESSAGES: Any = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]


@use("chat")
def chat() -> None:
    same_text(model.generate(MESSAGES).content, SERVER.answer)


@use("chat, streamed")
def chat_streamed() -> None:
    joined([piece.content for piece in model.generate_stream(MESSAGES)], SERVER.answer)


@use("agent with a tool")
def agent() -> None:
    """The agent can answer only by a tool call, and its own prompt is long."""
    asked: list[str] = []

    @tool
    def get_weather(city: str) -> str:
        """Return the weather in a city.

        Args:
            city: Its name.
        """
        asked.append(city)
        return "warm"

    get_weather.inputs["city"]["enum"] = list(CITIES)
    made = ToolCallingAgent(tools=[get_weather], model=OpenAIServerModel(**WHERE, max_tokens=256), max_steps=2)
    made.run(QUESTION)
    calls = [call for step in made.memory.steps for call in getattr(step, "tool_calls", None) or ()]
    equal(bool(calls), True)
