"""Chats with a reasoning model: answer and reasoning are separated whatever speculation does, and grammars and tool
calls apply to the answer."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from specdec.client import AsyncClient, Client, Completion, build_request
from specdec.v2 import generation_pb2, model_pb2
from tests.models import END
from tests.reasoning import CLOSE, OPEN, reasoning_model
from tests.services.conftest import Directories
from tests.services.test_equality import slow_target
from tests.services.test_structured_output import compiled
from tests.stack import Stack, stack

CHAT: list[Any] = [{"role": "user", "content": "how warm is it?"}]
OPENED, CLOSED = {"opened": True}, {"enable_thinking": False}
MARKED = {OPEN: 5.0, CLOSE: 4.0}
"""Biases, without which tiny models rarely write a mark."""


@pytest.fixture(scope="module")
def pair(directories: Directories, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target that reasons, and a draft near it."""
    folder = tmp_path_factory.mktemp("reasoning")
    draft = reasoning_model(directories.near, folder / "draft")
    return reasoning_model(directories.target, folder / "target"), draft


WANTED = {(False, True, True), (False, False, True), (True, True, True), (None, False, True)}
"""Kinds of texts to cover: (reasoning possible (False), begun (True) or ruled out (None); has reasoning; has an
answer)."""


def parts_of(tokens: Sequence[int], *, begun: bool | None) -> tuple[list[int], list[int]]:
    """Return the tokens of reasoning and of the answer. `begun`: True if begun by the prompt, False if possible, None
    if ruled out."""
    if begun is None or (not begun and tokens[0] != OPEN):
        return [], list(tokens)
    end = tokens.index(CLOSE) + 1 if CLOSE in tokens else len(tokens)
    return list(tokens[:end]), list(tokens[end:])


def check_split(services: Stack, prompt: list[int], completion: Completion, *, begun: bool | None) -> None:
    """Check the text of reasoning and answer; an answer without reasoning is decoded after the prompt."""
    reasoning, answer = parts_of(completion.tokens, begun=begun)
    decode = services.model.tokenizer.decode
    assert completion.reasoning_tokens == completion.finish.reasoning_tokens == len(reasoning)
    inner = reasoning[0 if begun else 1 : -1 if CLOSE in reasoning else None]
    assert completion.reasoning == decode(inner).lstrip()
    before = [] if reasoning else prompt
    expected = decode([*before, *answer])[len(decode(before)) :]
    assert completion.text == (expected.lstrip() if reasoning else expected)


def asked_of(arguments: dict[str, Any], seed: int, **others: Any) -> dict[str, Any]:
    """Return a request that varies with the seed."""
    messages: Any = [{"role": "user", "content": f"how warm is it{chr(33 + seed)}"}]
    fixed: dict[str, Any] = {"temperature": 1.0, "max_tokens": 60, "ignore_end_token": True, "logit_bias": MARKED}
    return fixed | {"messages": messages, "template_arguments": arguments, "seed": seed, **others}


async def a_reasoned_text(client: AsyncClient, arguments: dict[str, Any]) -> tuple[dict[str, Any], Completion]:
    """Return the first request, by seeds, whose text has both reasoning and an answer, and that text."""
    for start in range(0, 100, 4):
        requests = [asked_of(arguments, seed, max_tokens=30) for seed in range(start, start + 4)]
        answers = await asyncio.gather(*(client.complete(**asked) for asked in requests))
        for asked, answer in zip(requests, answers, strict=True):
            whole = answer.completions[0]
            if 3 < whole.reasoning_tokens < 25 and whole.text:
                return asked, whole
    raise AssertionError("no text has reasoning")


async def test_it_comes_apart_equally_with_and_without_drafts(pair: tuple[Path, Path]) -> None:
    kinds: Counter[tuple[bool | None, bool, bool]] = Counter()
    async with stack(*pair) as services, AsyncClient(services.address) as client:
        (model,) = await client.models()
        assert model.reasons

        async def check(seed: int) -> None:
            arguments, begun = (({}, False), ({}, False), (OPENED, True), (CLOSED, None))[seed % 4]
            asked = asked_of(arguments, seed)
            plain = (await client.complete(**asked, speculation="off")).completions[0]
            drafted = (await client.complete(**asked, speculation="always")).completions[0]
            prompt = await client.tokenize(messages=asked["messages"], template_arguments=arguments)
            check_split(services, prompt.ids, plain, begun=begun)
            assert drafted.tokens == plain.tokens
            assert (drafted.text, drafted.reasoning) == (plain.text, plain.reasoning)
            reasoning, answer = parts_of(plain.tokens, begun=begun)
            kinds[begun, bool(reasoning), bool(answer)] += 1

        for start in range(0, 80, 8):
            await asyncio.gather(*map(check, range(start, start + 8)))
            if kinds.keys() >= WANTED and start > 0:
                break
    assert kinds.keys() >= WANTED


async def test_a_stream_tells_reasoning_before_the_answer(pair: tuple[Path, Path]) -> None:
    async with stack(*pair) as services, AsyncClient(services.address) as client:
        asked, whole = await a_reasoned_text(client, OPENED)
        reasoning, text, count = "", "", 0
        async with client.generate(**asked) as stream:
            async for chunk in stream:
                assert not (text and chunk.reasoning_tokens)
                assert "".join(chunk.token_texts) == chunk.reasoning + chunk.text
                reasoning, text = reasoning + chunk.reasoning, text + chunk.text
                count += chunk.reasoning_tokens
        assert (reasoning, text, count) == (whole.reasoning, whole.text, whole.reasoning_tokens)


@pytest.mark.verify
async def test_a_text_is_resumed_from_anywhere(pair: tuple[Path, Path]) -> None:
    async with stack(*pair, target_delay=slow_target) as services, AsyncClient(services.address) as client:
        for arguments in ({}, OPENED):
            asked, whole = await a_reasoned_text(client, arguments)
            lengths = 0
            async with client.generate(**asked, speculation="off") as stream:
                reasoning = text = ""
                tokens: list[int] = []
                async for chunk in stream:
                    tokens += chunk.tokens
                    reasoning, text = reasoning + chunk.reasoning, text + chunk.text
                    if chunk.finish is not None:
                        break
                    rest = (await client.complete(**asked, generated_tokens=tokens)).completions[0]
                    assert tokens + rest.tokens == whole.tokens
                    assert (reasoning + rest.reasoning, text + rest.text) == (whole.reasoning, whole.text)
                    assert rest.reasoning_tokens == max(0, whole.reasoning_tokens - len(tokens))
                    assert rest.finish.reasoning_tokens == whole.reasoning_tokens
                    lengths += 1
            assert lengths > 3


async def test_a_schema_is_about_the_answer(pair: tuple[Path, Path]) -> None:
    """The model may begin its answer immediately, unless the prompt has opened its reasoning."""
    answer = "[0-9]{2,5}"
    async with stack(*pair) as services, AsyncClient(services.address) as client:
        await compiled(services, model_pb2.Grammar(regex=answer))

        async def both(arguments: dict[str, Any], seed: int) -> tuple[Completion, Completion]:
            asked = asked_of(arguments, seed, regex=answer, ignore_end_token=False, max_tokens=100)
            plain = await client.complete(**asked, speculation="off")
            drafted = await client.complete(**asked, speculation="always")
            return plain.completions[0], drafted.completions[0]

        for arguments in ({}, OPENED, CLOSED):
            with_both = 0
            for plain, drafted in await asyncio.gather(*(both(arguments, seed) for seed in range(8))):
                assert (drafted.tokens, drafted.text) == (plain.tokens, plain.text)
                if plain.finish.reason == "length":  # reasoning never ended: no closing token was chosen
                    assert END not in plain.tokens
                    assert not plain.text
                else:
                    with_both += bool(plain.reasoning_tokens)
                    assert plain.text.isdigit()
                    assert 2 <= len(plain.text) <= 5
                    assert plain.tokens[-1] == END
            assert with_both == 0 if arguments == CLOSED else with_both > 0


async def test_a_text_goes_on_at_an_orchestrator_that_knows_no_marks(pair: tuple[Path, Path]) -> None:
    """The second orchestrator uses the reasoning's position as resolved by the first, for text and grammar."""
    async with stack(*pair) as services, AsyncClient(services.address) as client:
        for arguments in ({}, OPENED):
            asked, _ = await a_reasoned_text(client, arguments)
            asked |= {"regex": "[0-9]{2,5}", "ignore_end_token": False, "max_tokens": 100}
            whole = await client.complete(**asked)
            for tokens in (2, 6):
                begun = build_request(**asked, generated_tokens=whole.completions[0].tokens[:tokens])
                begun.reasoning.CopyFrom(generation_pb2.Reasoning(opening_token=OPEN, closing_token=CLOSE))
                begun.reasoning.begun = arguments == OPENED
                vars(services.model)["reasoning_marks"] = None
                rest = await services.stub.Complete(generation_pb2.CompleteRequest(request=begun))
                del vars(services.model)["reasoning_marks"]
                assert rest.resolved.reasoning == begun.reasoning
                assert rest.completions[0].text == whole.text
                assert list(rest.completions[0].tokens) == whole.completions[0].tokens[tokens:]


async def test_a_text_need_not_be_split(pair: tuple[Path, Path]) -> None:
    async with stack(*pair) as services, AsyncClient(services.address) as client:
        asked, split = await a_reasoned_text(client, OPENED)
        whole = (await client.complete(**asked, split_reasoning=False)).completions[0]
        assert whole.tokens == split.tokens
        assert (whole.reasoning, whole.reasoning_tokens) == ("", 0)
        assert "</think>" in whole.text


async def test_the_client_that_blocks_tells_it_too(pair: tuple[Path, Path]) -> None:
    """A conversation continues with the answer, and with its reasoning for templates that repeat it."""

    def converse(address: str, asked: dict[str, Any], whole: Completion) -> None:
        with Client(address) as client:
            first = client.complete(**asked).completions[0]
            assert (first.text, first.reasoning) == (whole.text, whole.reasoning)
            answer: Any = {"role": "assistant", "content": "warm"}
            without, with_it = ([*CHAT, turn, *CHAT] for turn in (answer, {**answer, "reasoning": "it is May"}))
            assert len(client.tokenize(messages=with_it).ids) > len(client.tokenize(messages=without).ids)

    async with stack(*pair) as services, AsyncClient(services.address) as client:
        await asyncio.to_thread(converse, services.address, *await a_reasoned_text(client, OPENED))
