"""LiteLLM's Python SDK, with its providers for OpenAI-compatible servers and for vLLM."""

from __future__ import annotations

from typing import Any

import litellm

from tests.clients.checks.uses import (
    OPENAI_TOOL,
    PROMPT,
    QUESTION,
    TOKENS,
    called,
    equal,
    joined,
    same_text,
    server,
    use,
    weather,
)
from tests.clients.checks.weather import Weather

SERVER = server()
MESSAGES = [{"role": "user", "content": QUESTION}]
WHERE: Any = {"api_base": SERVER.base, "api_key": SERVER.key, "max_tokens": TOKENS, "temperature": 0}
CHAT: Any = {"model": f"openai/{SERVER.model}", "messages": MESSAGES, **WHERE}


@use("chat")
def chat() -> None:
    for provider in ("openai", "hosted_vllm"):
        answer = litellm.completion(**CHAT | {"model": f"{provider}/{SERVER.model}"})
        same_text(answer.choices[0].message.content, SERVER.answer)


@use("chat, streamed")
def chat_streamed() -> None:
    joined([event.choices[0].delta.content for event in litellm.completion(**CHAT, stream=True)], SERVER.answer)


@use("completion")
def completion() -> None:
    answer = litellm.text_completion(model=f"text-completion-openai/{SERVER.model}", prompt=PROMPT, **WHERE)
    same_text(answer.choices[0].text, SERVER.completion)


@use("tools")
def tools() -> None:
    (call,) = litellm.completion(**CHAT, tools=[OPENAI_TOOL], tool_choice="required").choices[0].message.tool_calls
    called(call.function.name, call.function.arguments)


@use("structured output")
def structured_output() -> None:
    weather(litellm.completion(**CHAT, response_format=Weather).choices[0].message.content)


@use("responses")
def responses() -> None:
    answer = litellm.responses(
        model=f"openai/{SERVER.model}",
        input=QUESTION,
        api_base=SERVER.base,
        api_key=SERVER.key,
        max_output_tokens=TOKENS,
        temperature=0,
    )
    same_text(answer.output[-1].content[0].text, SERVER.answer)


@use("messages")
async def messages() -> None:
    answer = await litellm.anthropic.messages.acreate(
        model=f"anthropic/{SERVER.model}",
        messages=MESSAGES,
        max_tokens=TOKENS,
        temperature=0,
        api_base=SERVER.url,
        api_key=SERVER.key,
    )
    same_text(answer["content"][0]["text"], SERVER.answer)


@use("context overflow")
def overflow() -> None:
    """A prompt that is too long raises the error that starts LiteLLM's fallbacks."""
    try:
        litellm.completion(**CHAT | {"messages": [{"role": "user", "content": "word " * 100_000}]})
    except litellm.ContextWindowExceededError as error:
        equal(error.status_code, 400)
    else:
        raise AssertionError("the prompt was accepted")
