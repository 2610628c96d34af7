"""A trained pair that people use: its tokens are the model's own, whatever drafts do, and its texts are whole."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from demo.real import DRAFT, TARGET
from specdec.client import Client
from specdec.client.options import Message
from tests.real.conftest import MODELS, Services

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        not all((path / "gguf.json").is_file() for path in MODELS.values()), reason="`make real` has not run"
    ),
]

MODES: list[dict[str, Any]] = [
    {"speculation": "draft"},
    {"speculation": "always"},
    {"speculation": "local"},
    {"speculation": "auto"},
    {"drafters": ["lookahead"], "forced": True},
]
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 5},
    {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1, "seed": 6},
]


def tokens(client: Client, asked: Sequence[dict[str, Any]], streams: int = 1) -> list[list[int]]:
    """Return the tokens of each request; `streams` requests run concurrently."""
    with ThreadPoolExecutor(streams) as pool:
        results = pool.map(lambda options: client.complete(**options), asked)
        return [result.completions[0].tokens for result in results]


@pytest.fixture(scope="module")
def asked(code: list[str], questions: list[list[str]]) -> list[dict[str, Any]]:
    """Code to continue and questions to answer, each with every sampling."""
    code_ = [{"prompt": prompt} for prompt in code[:24:6]]
    chats = [{"messages": [{"role": "user", "content": turns[0]}]} for turns in questions[::20]]
    pairs = itertools.product([*code_, *chats], SAMPLINGS)
    return [{**prompt, **sampling, "max_tokens": 48} for prompt, sampling in pairs]


@pytest.fixture(scope="module")
def plain(client: Client, asked: list[dict[str, Any]]) -> list[list[int]]:
    return tokens(client, [{**request, "speculation": "off"} for request in asked])


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.get("speculation", "lookahead"))
@pytest.mark.parametrize("streams", [1, 8])
def test_drafts_change_no_token(
    client: Client, asked: list[dict[str, Any]], plain: list[list[int]], mode: dict[str, Any], streams: int
) -> None:
    assert tokens(client, [{**request, **mode} for request in asked], streams) == plain


@pytest.mark.parametrize("role", ["draft", "verifier"])
def test_a_killed_service_changes_no_token(
    client: Client, services: Services, asked: list[dict[str, Any]], plain: list[list[int]], role: str
) -> None:
    request, expected = asked[1], plain[1]
    found: list[int] = []
    with client.generate(**request, speculation="always") as stream:
        for chunk in stream:
            if not found and chunk.tokens:
                services.kill(role)
            found += chunk.tokens
    assert found == expected
    deadline = time.monotonic() + 10
    while not any(line.startswith(f"{role} died") for line in services.said):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@torch.inference_mode()
def test_greedy_tokens_are_the_models(client: Client, code: list[str]) -> None:
    """Teacher-forced in float32, each token has the model's best logit or, since the service computes in bfloat16, one
    that is lower by less than `margin`. Most have the best."""
    margin = 0.5
    model = AutoModelForCausalLM.from_pretrained(MODELS[TARGET.name], dtype=torch.float32, local_files_only=True)
    best = total = 0
    for prompt in code[::16]:
        result = client.complete(prompt, max_tokens=64, temperature=0.0, ignore_end_token=True)
        ours = result.completions[0].tokens
        given = client.tokenize(prompt).ids
        logits = model(torch.tensor([[*given, *ours[:-1]]])).logits[0, len(given) - 1 :]
        chosen = logits[torch.arange(len(ours)), torch.tensor(ours)]
        assert (logits.max(dim=1).values - chosen).max() < margin
        best += int((logits.argmax(dim=1) == torch.tensor(ours)).sum())
        total += len(ours)
    print(f"{best} of {total} tokens are the best in float32")
    assert best >= 0.97 * total


def test_a_chat_of_several_turns_keeps_its_prefix(client: Client, questions: list[list[str]]) -> None:
    messages: list[Message] = []
    for turn in [*questions[3], "Now say it in one sentence.", "And in three words."]:
        messages.append({"role": "user", "content": turn})
        result = client.complete(messages=messages, max_tokens=40, temperature=0.0)
        plain = client.complete(messages=messages, max_tokens=40, temperature=0.0, speculation="off")
        assert result.completions[0].tokens == plain.completions[0].tokens
        assert result.text
        messages.append({"role": "assistant", "content": result.text})


@pytest.mark.parametrize("said", ["请用中文写一句关于春天的话。", "Answer with ten different emoji only."])
def test_characters_of_several_tokens_are_whole(client: Client, said: str) -> None:
    options: dict[str, Any] = {"messages": [{"role": "user", "content": said}], "max_tokens": 60, "temperature": 0.0}
    with client.generate(**options) as stream:
        streamed = "".join(chunk.text for chunk in stream)
    assert "\ufffd" not in streamed.rstrip("\ufffd")  # cut by max_tokens, the last character may be incomplete
    assert streamed == client.complete(**options, speculation="off").text
    assert any(ord(character) > 0x2000 for character in streamed)


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "stars": {"type": "integer", "minimum": 1, "maximum": 5},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 3},
    },
    "required": ["name", "stars", "tags"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda sampling: json.dumps(sampling))
def test_structured_output_is_valid(client: Client, sampling: dict[str, Any]) -> None:
    asked = [{"role": "user", "content": "Describe one good restaurant in Paris as JSON."}]
    options: dict[str, Any] = {"messages": asked, "json_schema": SCHEMA, "max_tokens": 120, **sampling}
    drafted = client.complete(**options)
    value = json.loads(drafted.text)
    assert value.keys() == {"name", "stars", "tags"}
    assert 1 <= value["stars"] <= 5
    assert drafted.completions[0].tokens == client.complete(**options, speculation="off").completions[0].tokens


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 30}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
SUM = {
    "type": "object",
    "properties": {"sum": {"type": "integer"}},
    "required": ["sum"],
    "additionalProperties": False,
}


def call_in(text: str) -> Any:
    """Return the call of a text that consists of one call in the model's format; else None."""
    found = re.fullmatch(r"\s*<tool_call>(.*)</tool_call>\s*", text, re.DOTALL)
    return None if found is None else json.loads(found[1])


def test_tools_beside_an_answer_schema(client: Client) -> None:
    """The model calls the tool when it should, and answers by the schema when it should. Unless the prompt mentions the
    tags, it writes calls in fences, without tags."""
    options: dict[str, Any] = {"tools": [WEATHER], "json_schema": SUM, "max_tokens": 60, "temperature": 0.0}
    question = "What is the weather in Paris right now? Call the function within <tool_call></tool_call> tags."
    weather: list[Message] = [{"role": "user", "content": question}]
    called = client.complete(messages=weather, **options)
    assert call_in(called.text) == {"name": "get_weather", "arguments": {"city": "Paris"}}
    added: list[Message] = [
        {"role": "user", "content": "Add 17 and 25. Answer as JSON with the field sum, without any tool."}
    ]
    assert json.loads(client.complete(messages=added, **options).text) == {"sum": 42}
    assert json.loads(client.complete(messages=weather, tool_choice="none", **options).text).keys() == {"sum"}
    assert call_in(client.complete(messages=added, tool_choice="required", **options).text)["name"] == "get_weather"


def test_the_draft_is_light(services: Services) -> None:
    """It takes at most 0.8 GB on disk; `python -m bench engine` measures its memory."""
    from specdec.engine.derived_models import place_of_export
    from specdec.engine.model_directory import ModelDirectory

    export = place_of_export(ModelDirectory(MODELS[DRAFT.name]), "float32", quantised=True)
    assert sum(file.stat().st_size for file in export.iterdir()) < 800_000_000
