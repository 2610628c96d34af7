"""Inspect: its providers for OpenAI-compatible servers and vLLM, with a tool."""

from __future__ import annotations

from typing import Any

from inspect_ai.model import ChatMessageUser, GenerateConfig, get_model
from inspect_ai.tool import ToolInfo, ToolParams
from inspect_ai.util import JSONSchema

from tests.clients.checks.uses import (
    CITIES,
    QUESTION,
    TOKENS,
    TOOL,
    TOOL_ABOUT,
    called,
    same_text,
    server,
    use,
)

SERVER = server()
CONFIG = GenerateConfig(temperature=0, max_tokens=TOKENS, max_retries=0)
MESSAGES = [ChatMessageUser(content=QUESTION)]


def model(provider: str, **options: Any) -> Any:
    return get_model(
        f"{provider}/{SERVER.model}", base_url=SERVER.base, api_key=SERVER.key, config=CONFIG, memoize=False, **options
    )


@use("chat")
async def chat() -> None:
    same_text((await model("openai-api/here").generate(MESSAGES)).completion, SERVER.answer)


@use("chat, as vLLM")
async def as_vllm() -> None:
    same_text((await model("vllm").generate(MESSAGES)).completion, SERVER.answer)


@use("responses")
async def responses() -> None:
    same_text((await model("openai", responses_api=True).generate(MESSAGES)).completion, SERVER.answer)


@use("tools")
async def tools() -> None:
    city = JSONSchema(type="string", enum=list(CITIES))
    tool = ToolInfo(
        name=TOOL, description=TOOL_ABOUT, parameters=ToolParams(properties={"city": city}, required=["city"])
    )
    answer = await model("openai-api/here").generate(MESSAGES, tools=[tool], tool_choice="any")
    (call,) = answer.message.tool_calls
    called(call.function, call.arguments)
