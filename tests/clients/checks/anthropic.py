"""Anthropic's Python client."""

from __future__ import annotations

from typing import Any

import anthropic

from tests.clients.checks.uses import (
    ARGUMENTS,
    QUESTION,
    TOKENS,
    TOOL,
    TOOL_ABOUT,
    called,
    equal,
    joined,
    same_text,
    server,
    use,
)

SERVER = server()
client: Any = anthropic.Anthropic(base_url=SERVER.url, api_key=SERVER.key, max_retries=0)
MESSAGES: Any = [{"role": "user", "content": QUESTION}]
ASKED: Any = {"model": SERVER.model, "messages": MESSAGES, "max_tokens": TOKENS}
TOOLS: Any = [{"name": TOOL, "description": TOOL_ABOUT, "input_schema": ARGUMENTS}]


@use("messages")
def messages() -> None:
    (block,) = client.messages.create(**ASKED).content
    same_text(block.text, SERVER.answer)


@use("messages, streamed")
def streamed() -> None:
    with client.messages.stream(**ASKED) as stream:
        joined(list(stream.text_stream), SERVER.answer)
        equal(stream.get_final_message().usage.output_tokens > 0, True)


@use("tools")
def tools() -> None:
    answer = client.messages.create(**ASKED, tools=TOOLS, tool_choice={"type": "any"})
    equal(answer.stop_reason, "tool_use")
    (block,) = [block for block in answer.content if block.type == "tool_use"]
    called(block.name, block.input)


@use("tools, streamed")
def tools_streamed() -> None:
    with client.messages.stream(**ASKED, tools=TOOLS, tool_choice={"type": "any"}) as stream:
        (block,) = [block for block in stream.get_final_message().content if block.type == "tool_use"]
    called(block.name, block.input)


@use("tool results")
def tool_results() -> None:
    """A conversation with a call and its result is accepted and answered."""
    answer = client.messages.create(**ASKED, tools=TOOLS, tool_choice={"type": "any"})
    result = {"type": "tool_result", "tool_use_id": answer.content[-1].id, "content": "warm"}
    turns = [*MESSAGES, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    equal(client.messages.create(**ASKED | {"messages": turns}, tools=TOOLS).role, "assistant")


@use("count tokens")
def count_tokens() -> None:
    counted = client.messages.count_tokens(model=SERVER.model, messages=MESSAGES).input_tokens
    usage = client.messages.create(**ASKED).usage
    equal(counted, usage.input_tokens + (usage.cache_read_input_tokens or 0))
