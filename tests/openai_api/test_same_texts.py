"""A request over HTTP gives the same text as over gRPC, with drafts, at any temperature."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError

from demo.train import CHAT_TEMPLATE
from specdec.client import AsyncClient
from tests.models import CONTEXT
from tests.openai_api.front import front
from tests.services.conftest import Directories
from tests.stack import long_steps, stack, until

SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9, "seed": 7},
    {"temperature": 1.0, "seed": -3, "frequency_penalty": 0.5, "logit_bias": {"5": -100}},
    {"temperature": 1.0, "seed": 11, "n": 3},
]


@pytest.fixture(scope="module")
def chatting(directories: Directories, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with a chat template."""
    target = tmp_path_factory.mktemp("chatting") / "target"
    shutil.copytree(directories.target, target)
    settings = json.loads((target / "tokenizer_config.json").read_text())
    (target / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": CHAT_TEMPLATE}))
    return target


def as_by_grpc(sampling: dict[str, Any]) -> dict[str, Any]:
    """Return the equivalent options of the gRPC client."""
    given = dict(sampling)
    if "seed" in given:
        given["seed"] %= 1 << 64
    if "logit_bias" in given:
        given["logit_bias"] = {int(token): bias for token, bias in given["logit_bias"].items()}
    return given


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
async def test_texts_are_equal(directories: Directories, chatting: Path, sampling: dict[str, Any]) -> None:
    prompt: Any = [{"role": "user", "content": "the quick brown fox"}]
    async with stack(chatting, directories.near) as services, front(services.address) as http:
        async with AsyncClient(services.address) as client:
            asked = {**as_by_grpc(sampling), "max_tokens": 24}
            completions = await client.complete(tokens=[5, 6, 7, 8], **asked)
            chats = await client.complete(messages=prompt, **asked)
        for stream in (False, True):
            told: Any = {"model": services.model.name, "max_tokens": 24, "stream": stream, **sampling}
            by_http = await http.client.completions.create(prompt=[5, 6, 7, 8], **told)
            chat_by_http = await http.client.chat.completions.create(messages=prompt, **told)
            texts, chat_texts = dict.fromkeys(range(3), ""), dict.fromkeys(range(3), "")
            if stream:
                async for event in by_http:
                    for choice in event.choices:
                        texts[choice.index] += choice.text
                async for event in chat_by_http:
                    for choice in event.choices:
                        chat_texts[choice.index] += choice.delta.content or ""
            else:
                texts |= {choice.index: choice.text for choice in by_http.choices}
                chat_texts |= {choice.index: choice.message.content for choice in chat_by_http.choices}
            count = sampling.get("n", 1)
            assert [texts[index] for index in range(count)] == [each.text for each in completions.completions]
            assert [chat_texts[index] for index in range(count)] == [each.text for each in chats.completions]
        await until(lambda: services.idle)


async def test_a_caller_who_leaves_frees_all_memory(directories: Directories) -> None:
    """The memory of the verifier's session and of the draft's is freed."""
    slow = stack(directories.target, directories.near, target_delay=long_steps)
    async with slow as services, front(services.address) as http:
        stream = await http.client.completions.create(
            model=services.model.name, prompt=[5, 6, 7], max_tokens=400, stream=True, extra_body={"ignore_eos": True}
        )
        await anext(aiter(stream))
        assert not services.idle
        await stream.close()
        await until(lambda: services.idle)


async def test_what_a_text_must_look_like(directories: Directories) -> None:
    """The API has several fields for it; violations name the field that the caller used."""
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1, 22, 333]}, "b": {"type": "boolean"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    asked: dict[str, Any] = {"prompt": [5, 6, 7, 8], "max_tokens": 48, "temperature": 1.0, "seed": 3}
    async with stack(directories.target, directories.near) as services, front(services.address) as http:
        asked["model"] = services.model.name
        async with AsyncClient(services.address) as client:
            want = await client.complete(
                tokens=[5, 6, 7, 8], max_tokens=48, temperature=1.0, seed=3, json_schema=schema
            )
        assert json.loads(want.text).keys() == {"a", "b"}
        create: Any = http.client.completions.create
        for own in ({"json": schema}, {"regex": r'\{"a": (1|22|333), "b": (true|false)\}'}):
            assert (await create(**asked, extra_body={"structured_outputs": own})).choices[0].text == want.text
        named = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        assert (await create(**asked, extra_body={"response_format": named})).choices[0].text == want.text
        stream = await create(**asked, extra_body={"response_format": named}, stream=True)
        assert "".join([event.choices[0].text async for event in stream if event.choices]) == want.text
        for extra, param in (
            ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
            (
                {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
                "response_format",
            ),
            (
                {"response_format": {"type": "json_object", "schema": {"items": {"pattern": "(?<=a)b"}}}},
                "response_format",
            ),
        ):
            with pytest.raises(BadRequestError) as refused:
                await create(**asked, extra_body=extra)
            assert refused.value.param == param
        assert "response_format: /items/pattern: cannot be enforced" in str(refused.value)


async def test_more_samples_than_anybody_draws_take_no_memory(directories: Directories) -> None:
    """The orchestrator is asked first and limits their number."""
    async with stack(directories.target, None) as services, front(services.address) as http:
        for stream in (False, True):
            with pytest.raises(BadRequestError, match="n: is 4294967295, must be at most 16"):
                await http.client.completions.create(
                    model=services.model.name, prompt=[5], n=2**32 - 1, stream=stream, timeout=20
                )


LONG: dict[str, Any] = {
    "more": [5] * (CONTEXT + 1),
    "all": [5] * CONTEXT,
    "text": "the fox " * CONTEXT,
    "too long to be read": "x" * 10**6,
}


async def test_a_conversation_that_fills_the_context_too(directories: Directories, chatting: Path) -> None:
    async with stack(chatting, None) as services, front(services.address) as http:
        for length in (CONTEXT, 10**6):
            with pytest.raises(BadRequestError) as refused:
                await http.client.chat.completions.create(
                    model=services.model.name, messages=[{"role": "user", "content": "a " * length}]
                )
            assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "messages")


@pytest.mark.parametrize("prompt", LONG.values(), ids=LONG)
async def test_a_prompt_that_fills_the_context_has_a_code_of_its_own(directories: Directories, prompt: Any) -> None:
    """The code tells programs to shorten the prompt."""
    async with stack(directories.target, None) as services, front(services.address) as http:
        with pytest.raises(BadRequestError) as refused:
            await http.client.completions.create(model=services.model.name, prompt=prompt)
        assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "prompt")


async def test_scores_are_equal(directories: Directories) -> None:
    """Requests are like lm-evaluation-harness's: several prompts of token ids, echoed, with one new token or none."""
    prompts = [[1, 70, 80, 90, 5], list(range(3, 200))]
    async with stack(directories.target, None) as services, front(services.address) as http:
        async with AsyncClient(services.address) as client:
            wanted = [await client.complete(tokens=prompt, prompt_logprobs=1, max_tokens=0) for prompt in prompts]
        asked: Any = {"model": services.model.name, "prompt": prompts, "echo": True, "logprobs": 1, "temperature": 0}
        for max_tokens in (0, 1):
            answer = await http.client.completions.create(max_tokens=max_tokens, **asked)
            for choice, want in zip(answer.choices, wanted, strict=True):
                found = choice.logprobs
                assert found is not None
                assert found.token_logprobs[: len(want.prompt)] == [
                    e.logprobs and e.logprobs.chosen for e in want.prompt
                ]
                assert len(found.token_logprobs) == len(want.prompt) + max_tokens
                best = [next(iter(entry.logprobs.top.values())) for entry in want.prompt if entry.logprobs]
                assert [max(top.values()) for top in found.top_logprobs[1 : len(want.prompt)]] == best
                for place, token in zip(found.text_offset, found.tokens, strict=True):
                    assert choice.text.startswith(token, place) or "\ufffd" in token
        chat: Any = {"model": services.model.name, "messages": [{"role": "user", "content": "hello"}]}
        with pytest.raises(BadRequestError, match="prompt_logprobs: is 21, must be at most 20"):
            await http.client.chat.completions.create(**chat, extra_body={"prompt_logprobs": 21})
        with pytest.raises(BadRequestError) as refusal:
            await http.client.completions.create(**asked | {"logprobs": 25})
        assert refusal.value.message.count("logprobs: is 25, must be at most 20") == 1
        with pytest.raises(BadRequestError, match="max_tokens: is 0, must be at least 1"):
            await http.client.completions.create(model=services.model.name, prompt="a", max_tokens=0)
        with pytest.raises(BadRequestError, match="n: is 2, must be 1 with max_tokens 0"):
            await http.client.completions.create(max_tokens=0, n=2, **asked)
