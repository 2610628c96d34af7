"""Complete responses: long parts are encoded incrementally."""

from __future__ import annotations

import json
import time

import pytest
from google.protobuf.json_format import ParseDict

from specdec.client.completion import Chunk, read_chunk
from specdec.openai_api.answers import Choice
from specdec.v2 import generation_pb2 as pb

TOP = 20


def chunk(*, spelt: bool = True, last: bool = False) -> Chunk:
    """Return a token with its logprobs; `spelt`: the most probable ones have their bytes."""
    response = pb.GenerateResponse(text="a", tokens=[97])
    logprobs = response.logprobs.add(
        chosen=-0.5,
        chosen_bytes=b"a",
        top_tokens=range(97, 97 + TOP),
        top_logprobs=[-0.5 - number for number in range(TOP)],
        top_bytes=[bytes([97 + number]) for number in range(TOP)],
    )
    if not spelt:
        logprobs.ClearField("top_bytes")
    if last:
        ParseDict({"reason": "FINISH_REASON_STOP"}, response.finish)
    return read_chunk(response)


def a_choice(*, chat: bool) -> Choice:
    return Choice(0, first_sample=True, chat=chat, logprobs=True)


@pytest.mark.parametrize("chat", [False, True])
def test_log_probabilities_are_encoded_as_they_come(chat: bool) -> None:
    """Encoding all of them at the end would stall the event loop."""
    choice = a_choice(chat=chat)
    begin = time.process_time()
    for number in range(2000):
        choice.gather(chunk(last=number == 1999), None)
    gathered = time.process_time()
    text = choice.whole()
    assert time.process_time() - gathered < (gathered - begin) / 10
    logprobs = json.loads(text)["logprobs"]
    assert len(logprobs["content" if chat else "tokens"]) == 2000
    if not chat:
        assert logprobs["text_offset"] == list(range(2000))


@pytest.mark.parametrize("chat", [False, True])
def test_a_token_may_be_told_without_what_it_stands_for(chat: bool) -> None:
    """An older orchestrator sends no bytes for the most probable tokens."""
    choice = a_choice(chat=chat)
    assert choice.piece(chunk(spelt=False), None)["logprobs"]
    choice.gather(chunk(spelt=False, last=True), None)
    logprobs = json.loads(choice.whole())["logprobs"]
    if chat:
        (told,) = logprobs["content"]
        assert {each["token"] for each in told["top_logprobs"]} == {""}
        assert len(told["top_logprobs"]) == TOP
    else:
        assert logprobs["top_logprobs"] == [{"": -0.5}]
