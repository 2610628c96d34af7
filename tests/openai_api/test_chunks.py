"""`specdec.chunks`: the tokens of an answer with their sources add up to its text and to the counts of the API."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from openai import BadRequestError

from tests.client.fake_server import TEXT, TOKENS, Act, FakeServer
from tests.openai_api.front import front

ASKED: dict[str, Any] = {"model": "fake", "extra_body": {"specdec": {"chunks": True}}}
MESSAGES: Any = [{"role": "user", "content": "hello"}]


def check(chunks: list[dict[str, Any]], statistics: dict[str, Any]) -> None:
    """Check that chunks add up to the statistics of the answer."""
    assert [token for chunk in chunks for token in chunk["tokens"]] == TOKENS
    assert "".join(text for chunk in chunks for text in chunk["token_texts"]) == TEXT
    assert Counter(source for chunk in chunks for source in chunk["sources"]) == statistics["sources"]
    for name in ("steps", "offered"):
        assert sum(chunk[name] for chunk in chunks) == statistics[name]
    assert [chunk["elapsed_seconds"] for chunk in chunks] == sorted(chunk["elapsed_seconds"] for chunk in chunks)
    assert all(0 < chunk["forward_seconds"] < chunk["step_seconds"] for chunk in chunks)


@pytest.mark.parametrize("chat", [False, True])
async def test_chunks_of_a_stream_add_up(chat: bool) -> None:
    async with FakeServer() as orchestrator, front(orchestrator.address) as http:
        create: Any = http.client.chat.completions.create if chat else http.client.completions.create
        asked = {**ASKED, **({"messages": MESSAGES} if chat else {"prompt": "def"})}
        found: list[dict[str, Any]] = []
        statistics: dict[str, Any] = {}
        async for event in await create(stream=True, **asked):
            for choice in event.choices:
                own = getattr(choice, "specdec", None) or {}
                found += own.get("chunks", [])
                statistics = own if choice.finish_reason else statistics
    check(found, statistics)


async def test_chunks_of_a_whole_answer_add_up() -> None:
    async with FakeServer() as orchestrator, front(orchestrator.address) as http:
        answer: Any = await http.client.completions.create(prompt="def", n=2, **ASKED)
    for choice in answer.choices:
        check(choice.specdec["chunks"], choice.specdec)


async def test_answers_have_no_chunks_unasked() -> None:
    async with FakeServer() as orchestrator, front(orchestrator.address) as http:
        answer: Any = await http.client.completions.create(model="fake", prompt="def")
    assert "chunks" not in answer.choices[0].specdec


@pytest.mark.parametrize(("wanted", "hidden"), [(True, 0), (False, 5)])
async def test_unwanted_reasoning_has_no_texts(wanted: bool, hidden: int) -> None:
    async with FakeServer(Act(thinks=5)) as orchestrator, front(orchestrator.address) as http:
        asked: Any = {"model": "fake", "messages": MESSAGES}
        extra = {"specdec": {"chunks": True, "rejected_candidates": True}, "include_reasoning": wanted}
        answer: Any = await http.client.chat.completions.create(**asked, extra_body=extra)
    chunks = answer.choices[0].specdec["chunks"]
    assert sum(chunk["reasoning_tokens"] for chunk in chunks) == 5
    texts = [text for chunk in chunks for text in chunk["token_texts"]]
    pieces = [text for text in texts[:5] if text]
    assert bool(pieces) is wanted
    assert len(texts) == len(TOKENS)
    assert TEXT.endswith("".join(texts[5:]))
    assert hidden == 0 or texts[:5] == [""] * hidden
    rejected = [candidate["text"] for chunk in chunks for candidate in chunk.get("rejected", [])]  # in the reasoning
    assert rejected == (["x", "y"] if wanted else ["", ""])


@pytest.mark.parametrize("chat", [False, True])
async def test_rejected_candidates_are_told(chat: bool) -> None:
    async with FakeServer() as orchestrator, front(orchestrator.address) as http:
        create: Any = http.client.chat.completions.create if chat else http.client.completions.create
        prompt = {"messages": MESSAGES} if chat else {"prompt": "def"}
        own = {"chunks": True, "rejected_candidates": True}
        answer: Any = await create(model="fake", **prompt, extra_body={"specdec": own})
    assert orchestrator.calls[0].request.rejected_candidates
    first, *_ = answer.choices[0].specdec["chunks"]
    assert first["rejected"] == [
        {"position": 1, "depth": 0, "token": 120, "text": "x", "source": "ngram"},
        {"position": 2, "depth": 1, "token": 121, "text": "y", "source": "ngram"},
    ]


@pytest.mark.parametrize(
    ("own", "problem"),
    [
        ({"chunks": "yes"}, r'specdec.chunks: is "yes", must be true or false'),
        ({"rejected_candidates": True}, "specdec.rejected_candidates: needs specdec.chunks: true"),
        ({"chunks": False, "rejected_candidates": True}, "specdec.rejected_candidates: needs specdec.chunks: true"),
        ({"chunks": True, "rejected_candidates": 1}, "specdec.rejected_candidates: is 1, must be true or false"),
        ({"chunk": True}, r"specdec.chunk: unknown parameter, must be one of .*chunks"),
    ],
)
async def test_wrong_values_are_refused(own: dict[str, Any], problem: str) -> None:
    async with FakeServer() as orchestrator, front(orchestrator.address) as http:
        with pytest.raises(BadRequestError, match=problem):
            await http.client.completions.create(model="fake", prompt="def", extra_body={"specdec": own})
    assert not orchestrator.calls


async def test_other_apis_refuse_them() -> None:
    async with FakeServer() as orchestrator, front(orchestrator.address) as http:
        with pytest.raises(BadRequestError, match=r"specdec.chunks: is for /v1/completions"):
            await http.client.responses.create(model="fake", input="hello", extra_body=ASKED["extra_body"])
