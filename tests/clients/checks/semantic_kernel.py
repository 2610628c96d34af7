"""Semantic Kernel: chats, whole and streamed, and tools."""

from __future__ import annotations

from typing import Annotated, Any

from openai import AsyncOpenAI
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion, OpenAIChatPromptExecutionSettings
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import kernel_function

from tests.clients.checks.uses import QUESTION, TOKENS, equal, joined, same_text, server, use, weather
from tests.clients.checks.weather import Weather

SERVER = server()


class Plugin:
    """A tool and its recorded arguments. They are booleans: for an enumeration of texts, its schema would allow any
    object."""

    def __init__(self) -> None:
        self.asked: list[bool] = []

    @kernel_function(name="get_weather", description="Return the weather.")
    def get_weather(self, celsius: Annotated[bool, "In which unit."]) -> str:
        self.asked.append(celsius)
        return "warm"


def service() -> Any:
    return OpenAIChatCompletion(
        ai_model_id=SERVER.model,
        async_client=AsyncOpenAI(base_url=SERVER.base, api_key=SERVER.key, max_retries=0),
    )


def history() -> ChatHistory:
    made = ChatHistory()
    made.add_user_message(QUESTION)
    return made


def settings(**options: Any) -> Any:
    return OpenAIChatPromptExecutionSettings(temperature=0, max_tokens=TOKENS, **options)


@use("chat")
async def chat() -> None:
    same_text(str(await service().get_chat_message_content(history(), settings())), SERVER.answer)


@use("chat, streamed")
async def chat_streamed() -> None:
    stream = service().get_streaming_chat_message_content(history(), settings())
    joined([str(piece) async for piece in stream], SERVER.answer)


@use("structured output")
async def structured_output() -> None:
    weather(str(await service().get_chat_message_content(history(), settings(response_format=Weather))))


@use("tools")
async def tools() -> None:
    plugin, kernel = Plugin(), Kernel()
    kernel.add_plugin(plugin, "p")
    choice = FunctionChoiceBehavior.Required(maximum_auto_invoke_attempts=1)
    asked = settings(function_choice_behavior=choice)
    asked.max_tokens = 256
    await service().get_chat_message_content(history(), asked, kernel=kernel)
    equal(bool(plugin.asked), True)
