"""The prompt in answers: its text in front of completions (`echo`), and its log-probabilities."""

from __future__ import annotations

import json
from itertools import accumulate
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.client import Chunk, Piece
from specdec.openai_api import gateway
from specdec.openai_api.prompts import EchoOffset, prompt_first
from specdec.openai_api.requests import parse_fields
from tests.client.fake_server import TEXT, TOKENS, Act, FakeServer
from tests.openai_api.front import Front, front

CHAT: Any = [{"role": "user", "content": "hello"}]


async def post(http: Front, **fields: Any) -> Any:
    """Return the raw answer, without the official client's types."""
    route = "/chat/completions" if "messages" in fields else "/completions"
    return await http.client.post(route, body={"model": "fake", **fields}, cast_to=object)


def logprobs_of(prompt: bytes, top: int) -> dict[str, Any]:
    """Return the `logprobs` of a prompt at the fake server, which puts a special token before it."""
    return {
        "tokens": ["\0", *(chr(byte) for byte in prompt)],
        "token_logprobs": [None, *(-at / 8 for at in range(1, 1 + len(prompt)))],
        "top_logprobs": [None, *[{chr(97 + best): -0.125 * (1 + best) for best in range(top)}] * len(prompt)],
        "text_offset": [0, *range(len(prompt))],
    }


async def test_the_prompt_is_in_front_of_every_completion() -> None:
    """Its text is as given, or as its tokens spell it. Without `logprobs`, nothing is scored."""
    async with FakeServer() as server, front(server.address) as http:
        for prompt, text in (("déjà", "déjà"), ([100, 195, 169], "dé"), (["a", "b"], None)):
            answer = await post(http, prompt=prompt, echo=True, n=2)
            texts = [choice["text"] for choice in answer["choices"]]
            assert texts == [text + TEXT] * 2 if text else ["a" + TEXT] * 2 + ["b" + TEXT] * 2
            assert all(choice["logprobs"] is None for choice in answer["choices"])
        assert not any(call.request.HasField("prompt_logprobs") for call in server.calls)


@pytest.mark.parametrize("n", [1, 3])
async def test_its_log_probabilities_come_before_those_of_the_completion(n: int) -> None:
    async with FakeServer() as server, front(server.address) as http:
        answer = await post(http, prompt="ab", echo=True, logprobs=2, n=n)
    assert server.calls[0].request.prompt_logprobs == 2
    for choice in answer["choices"]:
        found, want = choice["logprobs"], logprobs_of(b"ab", 2)
        for name, values in want.items():
            assert found[name][:3] == values
            assert len(found[name]) == 3 + len(TOKENS)
        assert choice["text"] == "ab" + TEXT
        assert found["text_offset"][3:5] == [2, 3]  # "d", then the bytes of "é"
        assert "prompt_logprobs" not in choice


async def test_what_lm_eval_sends() -> None:
    """lm-eval sends prompts as token ids, sums the log-probabilities of their last tokens, and drops the new token."""
    prompts = [[97, 98, 99], [97, 98]]
    body = {"prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    async with FakeServer() as server, front(server.address) as http:
        answer = await post(http, **body)
        none = await post(http, **body | {"max_tokens": 0})
    for given_answer in (answer, none):
        for index, (choice, prompt) in enumerate(zip(given_answer["choices"], prompts, strict=True)):
            assert choice["index"] == index
            found = choice["logprobs"]
            assert found["token_logprobs"][: len(prompt)] == [None, -0.125, -0.25][: len(prompt)]
            assert found["top_logprobs"][1] == {"a": -0.125, "b": -0.125}  # the best, and the token itself
            assert found["tokens"][: len(prompt)] == [chr(token) for token in prompt]
            assert found["text_offset"][: len(prompt)] == list(range(len(prompt)))
            assert choice["finish_reason"] == "length"
    assert [choice["text"] for choice in none["choices"]] == ["abc", "ab"]
    assert [len(choice["logprobs"]["tokens"]) for choice in none["choices"]] == [3, 2]
    assert none["usage"]["completion_tokens"] == 0


async def test_the_field_of_vllm() -> None:
    entry = {"logprob": -0.125, "rank": 3, "decoded_token": "a"}
    async with FakeServer() as server, front(server.address) as http:
        answer = await post(http, prompt="za", prompt_logprobs=1)
        chat = await post(http, messages=CHAT, prompt_logprobs=0)
        both = await post(http, prompt="ab", prompt_logprobs=0, echo=True, logprobs=1)
    (choice,) = answer["choices"]
    assert choice["prompt_logprobs"] == [
        None,
        {"122": {"logprob": -0.125, "rank": 3, "decoded_token": "z"}, "97": entry | {"rank": 1}},
        {"97": {"logprob": -0.125, "rank": 1, "decoded_token": "a"}},
    ]
    assert (choice["text"], choice["logprobs"]) == (TEXT, None)
    assert chat["prompt_logprobs"] == [None]
    assert server.calls[-1].request.prompt_logprobs == 1
    (choice,) = both["choices"]
    assert choice["prompt_logprobs"][1] == {"97": entry}
    assert choice["logprobs"]["top_logprobs"][1] == {"a": -0.125}


@pytest.mark.parametrize("logprobs", [None, 1])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("as_tokens", [False, True])
async def test_a_stream_begins_with_the_prompt(n: int, logprobs: int | None, as_tokens: bool) -> None:
    """Every sample's stream does, and its pieces join to the whole answer."""
    async with FakeServer() as server, front(server.address) as http:
        prompts: Any = [[97, 195, 169, 98], [120, 121]] if as_tokens else ["abcdefgh", "xy"]
        asked: Any = {"model": "fake", "prompt": prompts, "echo": True, "n": n, "logprobs": logprobs}
        whole = (await http.client.completions.create(**asked)).model_dump()
        pieces: list[list[Any]] = [[] for _ in whole["choices"]]
        async for event in await http.client.completions.create(**asked, stream=True):
            for choice in event.choices:
                pieces[choice.index].append(choice)
    for choice in whole["choices"]:
        found = pieces[choice["index"]]
        assert choice["text"].startswith(found[0].text)
        assert choice["text"] == ("xy" if choice["index"] >= n else "aéb" if as_tokens else "abcdefgh") + TEXT
        assert "".join(piece.text for piece in found) == choice["text"]
        assert [piece.finish_reason for piece in found] == [None] * (len(found) - 1) + ["length"]
        for name in (choice["logprobs"] or {}) if logprobs else ():
            joined = [value for piece in found if piece.logprobs for value in getattr(piece.logprobs, name)]
            assert joined == choice["logprobs"][name]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": CHAT, "echo": True}, "echo"),
        ({"prompt": "a", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt": "a", "prompt_logprobs": True}, "prompt_logprobs"),
        ({"prompt": "a", "prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt": "a", "echo": 1}, "echo"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    async with FakeServer() as server, front(server.address) as http:
        with pytest.raises(openai.BadRequestError) as refusal:
            await post(http, **fields)
        assert (refusal.value.param, server.calls) == (param, [])


async def test_an_answer_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sample's copy of the prompt's log-probabilities counts."""
    monkeypatch.setattr(gateway, "MAX_ANSWER_CHARACTERS", 1 << 20)
    prompt, tokens = "a" * 500, 500
    each = len(json.dumps(logprobs_of(b"a", 20)["top_logprobs"][1]))
    prompts = 2 + (1 << 20) // (16 * tokens * each)
    assert prompts <= 64
    async with FakeServer(*[Act(0)] * 64) as server, front(server.address) as http:
        with pytest.raises(
            openai.BadRequestError, match="stream: is false, and the answer has more than 1048576 characters: set it"
        ):
            await http.client.completions.create(model="fake", prompt=[prompt] * prompts, n=16, logprobs=20, echo=True)
        assert server.calls


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "a" * 1000, "echo": True, "n": 16},
        {"prompt": "a", "logprobs": 20, "n": 16},
    ],
)
async def test_all_parts_of_an_answer_count(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "MAX_ANSWER_CHARACTERS", 10_000)
    async with FakeServer() as server, front(server.address) as http:
        with pytest.raises(openai.BadRequestError, match="the answer has more than 10000 characters"):
            await post(http, **fields)


def test_defaults_are_no_request() -> None:
    fields = {"model": "m", "messages": CHAT, "echo": False, "prompt_logprobs": None}
    assert not parse_fields(fields, chat=True).scores_prompts


@given(st.lists(st.text(max_size=3), max_size=8), st.booleans())
def test_offsets_are_places_in_the_text(pieces: list[str], spaced: bool) -> None:
    """Even after special tokens, and if the tokenizer puts a space before the text."""
    text = "".join(pieces)
    offset = EchoOffset(text.encode())
    assert [offset.before(Piece("", b"<s>")) for _ in range(2)] == [0, 0] or text.startswith("<s>")
    offset = EchoOffset(text.encode())
    spelt = [piece.encode() for piece in pieces]
    if spaced and spelt and spelt[0].lstrip() == spelt[0]:
        spelt[0] = b" " + spelt[0]
    found = [offset.before(Piece("", piece)) for piece in spelt]
    assert found == [0, *accumulate(map(len, pieces))][: len(pieces)]


async def test_other_samples_wait_for_the_prompt() -> None:
    async def chunks() -> Any:
        for index, tokens in ((1, [5]), (0, []), (1, [6]), (0, [7]), (1, [8])):
            seed = 11 if tokens == [5] else None  # in the first chunk
            yield Chunk(index, "", tokens, [], [], [], 0.0, 0.0, 0.0, 1, 0, None, seed, "", None)

    found = [chunk async for chunk in prompt_first(chunks())]
    assert [(chunk.index, chunk.tokens) for chunk in found] == [(0, []), (0, [7]), (1, [5]), (1, [6]), (1, [8])]
    assert found[0].seed == 11
    assert found[1].seed is None
