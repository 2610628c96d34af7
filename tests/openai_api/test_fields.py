"""Fields of vLLM's requests: what the orchestrator gets for them, and what answers contain."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest
from google.protobuf.json_format import ParseDict

from specdec.client.completion import read_chunk
from specdec.openai_api.answers import Choice
from specdec.openai_api.requests import parse_fields
from specdec.v2 import generation_pb2 as pb
from tests.client.fake_server import PROMPT, TOKENS, FakeServer
from tests.openai_api.front import front

CHAT: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION: dict[str, Any] = {"model": "fake", "prompt": "def"}


async def asked(path: str, **fields: Any) -> tuple[pb.GenerateRequest, Any]:
    """Return the orchestrator's request, and the answer: the whole answer or the events of a stream."""
    async with (
        FakeServer() as server,
        front(server.address) as http,
        httpx2.AsyncClient(base_url=f"http://{http.address}") as client,
    ):
        answer = await client.post(path, json=fields)
    assert answer.status_code == 200, answer.text
    if not fields.get("stream"):
        return server.calls[-1].request, answer.json()
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    return server.calls[-1].request, [json.loads(event) for event in events]


async def test_fields_of_vllm_arrive() -> None:
    fields = {
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "allowed_token_ids": list(range(5000)),
        "bad_words": ["no"],
        "truncate_prompt_tokens": 7,
        "min_p": 1.0,
        "typical_p": 0.5,
        "cache_salt": "s",
    }
    for path, prompt in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
        request, _ = await asked(path, **prompt, **fields)
        assert request.show_special_tokens
        assert request.include_stop
        assert list(request.sampling.allowed_tokens) == list(range(5000))
        assert list(request.sampling.bad_words) == ["no"]
        assert (request.sampling.min_p, request.sampling.typical_p) == (1.0, 0.5)
        assert (request.truncate_prompt_tokens, request.cache_salt) == (7, "s")
        assert not request.return_prompt_token_ids


async def test_a_completion_takes_either_name_of_its_limit() -> None:
    request, _ = await asked("/v1/completions", **COMPLETION, max_completion_tokens=5)
    assert request.max_tokens == 5


@pytest.mark.parametrize(
    ("fields", "continues", "without_prompt"),
    [
        ({}, False, False),
        ({"add_generation_prompt": True, "continue_final_message": False}, False, False),
        ({"add_generation_prompt": False}, False, True),
        ({"continue_final_message": True, "add_generation_prompt": False}, True, False),
        ({"continue_final_message": True}, True, False),
        ({"messages": [{"role": "assistant", "content": "so", "prefix": True}]}, True, False),
    ],
)
async def test_the_last_message_may_be_continued(fields: dict[str, Any], continues: bool, without_prompt: bool) -> None:
    request, _ = await asked("/v1/chat/completions", **CHAT | fields)
    assert (request.chat.continue_final_message, request.chat.no_generation_prompt) == (continues, without_prompt)


async def test_the_last_message_of_the_assistant_is_a_prefill_for_anthropic() -> None:
    messages = [*CHAT["messages"], {"role": "assistant", "content": "so"}]
    request, answer = await asked("/v1/messages", model="fake", max_tokens=9, messages=messages)
    assert request.chat.continue_final_message
    assert request.chat.messages[-1].content == "so"
    assert answer["role"] == "assistant"


async def test_token_ids_have_the_places_of_vllm() -> None:
    """The prompt's ids are in a chat's answer itself, or its stream's first event; in completions, in each choice."""
    wanted = {"return_token_ids": True, "n": 2}
    _, chat = await asked("/v1/chat/completions", **CHAT, **wanted)
    assert chat["prompt_token_ids"] == PROMPT
    assert [choice["token_ids"] for choice in chat["choices"]] == [TOKENS] * 2
    assert all("prompt_token_ids" not in choice for choice in chat["choices"])
    _, completion = await asked("/v1/completions", **COMPLETION, **wanted)
    assert "prompt_token_ids" not in completion
    assert [choice["prompt_token_ids"] for choice in completion["choices"]] == [PROMPT] * 2
    _, events = await asked("/v1/chat/completions", **CHAT, return_token_ids=True, stream=True)
    assert [event.get("prompt_token_ids") for event in events[:2]] == [PROMPT, None]
    assert [token for event in events for token in event["choices"][0].get("token_ids", [])] == TOKENS
    _, events = await asked("/v1/completions", **COMPLETION, **wanted, stream=True)
    told = [choice.get("prompt_token_ids") for event in events for choice in event["choices"]]
    assert [ids for ids in told if ids is not None] == [PROMPT] * 2


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("include", [False, True])
async def test_usage_in_every_event(path: str, include: bool) -> None:
    """guidellm requests this."""
    options = {"include_usage": include, "continuous_usage_stats": True}
    prompt = CHAT if "chat" in path else COMPLETION
    _, events = await asked(path, **prompt, stream=True, stream_options=options)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == len(TOKENS)
    assert counts[0] == (0 if "chat" in path else 3)
    assert {event["usage"]["prompt_tokens"] for event in events} == {len(PROMPT)}
    assert ([] in [event["choices"] for event in events]) == include


@pytest.mark.parametrize(
    ("reason", "stop", "last", "told"),
    [("STOP", "", 9, 9), ("STOP", "", 8, None), ("STOP", "x", 9, "x"), ("LENGTH", "", 9, None)],
)
def test_the_token_that_ended_a_text_is_named(reason: str, stop: str, last: int, told: Any) -> None:
    """Only a token that the request gave is named; the model's own end tokens are not."""
    choice = Choice(0, parse_fields({**CHAT, "stop_token_ids": [9]}, chat=True))
    response = pb.GenerateResponse(text="a", tokens=[5, last])
    ParseDict({"reason": f"FINISH_REASON_{reason}", "stop": stop}, response.finish)
    choice.gather(read_chunk(response), None)
    assert json.loads(choice.whole())["stop_reason"] == told
