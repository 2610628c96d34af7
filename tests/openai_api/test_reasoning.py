"""Reasoning comes in a separate field, with OpenAI's own client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError

from tests.openai_api.front import front
from tests.openai_api.test_tools import TOOLS, check
from tests.reasoning import CLOSE
from tests.stack import stack

OPENED = {"chat_template_kwargs": {"opened": True}}


def asked_of(name: str, **others: Any) -> dict[str, Any]:
    """Return a request whose response has reasoning and an answer."""
    messages: Any = [{"role": "user", "content": "how warm is it?"}]
    fixed = {"max_tokens": 40, "seed": 2, "temperature": 1.0, "logit_bias": {str(CLOSE): 4}, "extra_body": OPENED}
    return {"model": name, "messages": messages, **fixed, **others}


async def test_it_has_a_field_of_its_own(reasoning_pair: tuple[Path, Path]) -> None:
    async with stack(*reasoning_pair) as services, front(services.address) as http:
        create: Any = http.client.chat.completions.create
        asked = asked_of(services.model.name, logprobs=True)
        whole = await create(**asked)
        (choice,) = whole.choices
        assert choice.message.reasoning
        assert choice.message.content
        thought = whole.usage.completion_tokens_details.reasoning_tokens
        assert 0 < thought < whole.usage.completion_tokens
        ended = choice.finish_reason == "stop"  # the end token is not content
        assert len(choice.logprobs.content) == whole.usage.completion_tokens - thought - ended

        reasoning, content = "", ""
        async for event in await create(**asked, stream=True):
            delta = event.choices[0].delta
            assert not (content and getattr(delta, "reasoning", None))
            reasoning += getattr(delta, "reasoning", None) or ""
            content += delta.content or ""
        assert (reasoning, content) == (choice.message.reasoning, choice.message.content)

        for stream in (False, True):
            silent = await create(**asked | {"extra_body": {**OPENED, "include_reasoning": False}}, stream=stream)
            if stream:
                pieces = [event.choices[0].delta async for event in silent]
                assert not any(hasattr(piece, "reasoning") for piece in pieces)
                assert "".join(piece.content or "" for piece in pieces) == content
            else:
                assert not hasattr(silent.choices[0].message, "reasoning")
                assert silent.choices[0].message.content == content


async def test_an_answer_that_is_cut_off_while_it_reasons(reasoning_pair: tuple[Path, Path]) -> None:
    async with stack(*reasoning_pair) as services, front(services.address) as http:
        answer: Any = await http.client.chat.completions.create(**asked_of(services.model.name, max_tokens=1))
        (choice,) = answer.choices
        assert (choice.finish_reason, choice.message.content) == ("length", None)


async def test_a_text_need_not_be_split(reasoning_pair: tuple[Path, Path]) -> None:
    async with stack(*reasoning_pair) as services, front(services.address) as http:
        own = {"extra_body": {**OPENED, "specdec": {"split_reasoning": False}}}
        answer: Any = await http.client.chat.completions.create(**asked_of(services.model.name) | own)
        assert "</think>" in answer.choices[0].message.content
        assert not hasattr(answer.choices[0].message, "reasoning")


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
async def test_the_next_request_repeats_it(reasoning_pair: tuple[Path, Path], name: str) -> None:
    """The reasoning may have either of the two field names in use."""
    async with stack(*reasoning_pair) as services, front(services.address) as http:
        turn: Any = {"role": "assistant", "content": "warm", name: "it is May"}
        messages = [{"role": "user", "content": "how warm is it?"}, turn, {"role": "user", "content": "and now?"}]
        answer: Any = await http.client.chat.completions.create(**asked_of(services.model.name, messages=messages))
        without: Any = [{**each, name: None} for each in messages]
        other: Any = await http.client.chat.completions.create(**asked_of(services.model.name, messages=without))
        assert answer.usage.prompt_tokens > other.usage.prompt_tokens
        messages[1] = {**turn, name: 5}
        with pytest.raises(BadRequestError, match=r"messages\[1\]\.reasoning"):
            await http.client.chat.completions.create(**asked_of(services.model.name, messages=messages))
        messages[1] = {**turn, "reasoning": "one", "reasoning_content": "another"}
        with pytest.raises(BadRequestError, match="reasoning_content: differs from reasoning: give one of them"):
            await http.client.chat.completions.create(**asked_of(services.model.name, messages=messages))


async def test_schemas_and_calls_are_about_the_answer(reasoning_pair: tuple[Path, Path]) -> None:
    async with stack(*reasoning_pair) as services, front(services.address) as http:
        create: Any = http.client.chat.completions.create
        schema: dict[str, Any] = {"type": "object", "properties": {"warm": {"type": "boolean"}}, "required": ["warm"]}
        schema |= {"additionalProperties": False}
        wanted = {"type": "json_schema", "json_schema": {"name": "warmth", "schema": schema}}
        asked = asked_of(services.model.name, max_tokens=200)
        (fits,) = (await create(**asked, response_format=wanted)).choices
        assert fits.message.reasoning
        assert json.loads(fits.message.content).keys() == {"warm"}
        (calls,) = (await create(**asked, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)).choices
        assert calls.message.reasoning
        assert (calls.finish_reason, calls.message.content) == ("tool_calls", None)
        check(calls.message.tool_calls)
