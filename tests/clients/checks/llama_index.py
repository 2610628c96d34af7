"""LlamaIndex with OpenAILike and OpenAIResponses."""

from typing import Any, Literal

from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai import OpenAIResponses
from llama_index.llms.openai_like import OpenAILike

from tests.clients.checks.uses import PROMPT, QUESTION, TOKENS, called, joined, same_text, server, use, weather
from tests.clients.checks.weather import Weather

SERVER = server()
WHERE: Any = {"model": SERVER.model, "api_base": SERVER.base, "api_key": SERVER.key, "temperature": 0, "max_retries": 0}
LIMITS: Any = {"max_tokens": TOKENS, "context_window": 8192}
chat_model = OpenAILike(
    **WHERE, **LIMITS, is_chat_model=True, is_function_calling_model=True, should_use_structured_outputs=True
)
MESSAGES = [ChatMessage(role="user", content=QUESTION)]


def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """Return the weather in a city."""
    return f"It is warm in {city}."


@use("completion")
def completion() -> None:
    model = OpenAILike(**WHERE, **LIMITS, is_chat_model=False)
    same_text(model.complete(PROMPT).text, SERVER.completion)


@use("chat")
def chat() -> None:
    same_text(chat_model.chat(MESSAGES).message.content, SERVER.answer)


@use("chat, streamed")
def chat_streamed() -> None:
    joined([piece.delta for piece in chat_model.stream_chat(MESSAGES)], SERVER.answer)


@use("tools")
def tools() -> None:
    answer = chat_model.chat_with_tools([FunctionTool.from_defaults(get_weather)], QUESTION, tool_required=True)
    (call,) = chat_model.get_tool_calls_from_response(answer)
    called(call.tool_name, call.tool_kwargs)


@use("structured output")
def structured_output() -> None:
    weather(chat_model.structured_predict(Weather, PromptTemplate(QUESTION)))


@use("responses")
def responses() -> None:
    model = OpenAIResponses(**WHERE, max_output_tokens=TOKENS, context_window=8192)
    same_text(model.chat(MESSAGES).message.content, SERVER.answer)
