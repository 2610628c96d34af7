"""A text is split into reasoning and answer at the marks, and what is readable of each is exactly what its tokens
spell."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.model import Model
from orchestrator.reasoning import Reasoning
from orchestrator.request import parse
from orchestrator.sample import Sample
from orchestrator.transcript import Transcript
from specdec.engine.model_directory import ModelDirectory
from specdec.serving.bounded_threads import BoundedThreads
from specdec.v2 import generation_pb2, model_pb2, verifier_pb2
from tests.models import VOCABULARY, make

OPEN, CLOSE, END = 0, 1, 2
PARTS = st.lists(st.integers(3, VOCABULARY - 1), max_size=30)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    directory: Path = make("llama", tmp_path_factory.mktemp("model") / "m")
    return Model.of(ModelDirectory(directory))


def sample_of(model: Model, *, begun: bool, **fields: Any) -> Sample:
    (sample,) = parse(generation_pb2.GenerateRequest(text="abc"), model).samples
    return replace(sample, **{"reasoning": Reasoning(OPEN, CLOSE, begun), **fields})


def commit_of(tokens: list[int], *, last: bool) -> verifier_pb2.Commit:
    reason = model_pb2.FINISH_REASON_STOP if tokens[-1:] == [END] else model_pb2.FINISH_REASON_LENGTH
    return verifier_pb2.Commit(
        committed=model_pb2.Committed(tokens=tokens),
        sources=[model_pb2.TOKEN_SOURCE_PLAIN] * len(tokens),
        finish_reason=reason if last else model_pb2.FINISH_REASON_UNSPECIFIED,
    )


def told(model: Model, sample: Sample, tokens: list[int]) -> generation_pb2.GenerateResponse:
    """What a client is told of a text whose tokens all come with one commit."""
    response = Transcript(sample, model, 0.0).take(commit_of(tokens, last=True))
    assert "".join(response.token_texts) == response.reasoning + response.text
    assert response.reasoning_tokens == response.finish.usage.reasoning_tokens
    return response


@given(begun=st.booleans(), reasoning=PARTS, answer=PARTS)
def test_it_is_split_at_the_marks(model: Model, begun: bool, reasoning: list[int], answer: list[int]) -> None:
    decode = model.tokenizer.decode
    tokens = [*([] if begun else [OPEN]), *reasoning, CLOSE]
    found = told(model, sample_of(model, begun=begun), [*tokens, *answer])
    assert (found.reasoning, found.text) == (decode(reasoning).lstrip(), decode(answer).lstrip())
    assert found.reasoning_tokens == len(tokens)


@given(answer=PARTS)
def test_an_answer_that_a_grammar_is_about_loses_nothing(model: Model, answer: list[int]) -> None:
    """White space at its beginning may be what the grammar asks for."""
    sample = sample_of(model, begun=True, grammar=model_pb2.Grammar(regex=" yes"))
    space = model.tokenizer.encode(" ", special=False)
    found = told(model, sample, [70, CLOSE, *space, *answer])
    assert found.text == model.tokenizer.decode([*space, *answer])


@given(answer=PARTS)
def test_a_text_that_does_not_begin_with_the_mark_has_no_reasoning(model: Model, answer: list[int]) -> None:
    """Wherever a mark stands in it later."""
    tokens = [70, *answer, OPEN, *answer, CLOSE, 70]
    marked = told(model, sample_of(model, begun=False), tokens)
    assert marked.text == told(model, sample_of(model, begun=False, reasoning=None), tokens).text
    assert marked.reasoning_tokens == 0


def test_stop_strings_end_the_answer_alone(model: Model) -> None:
    b, c = model.tokenizer.encode("bc", special=False)
    found = told(model, sample_of(model, begun=True, stop=("bc",)), [b, c, CLOSE, c, b, c, b])
    assert (found.reasoning, found.text, found.finish.stop) == ("bc", "c", "bc")
    assert list(found.tokens) == [b, c, CLOSE, c, b, c]


@pytest.mark.parametrize("last", [END, 70])
def test_reasoning_that_never_ends_is_no_answer(model: Model, last: int) -> None:
    """What is held back at the end, and the end token, belong to it as well."""
    thought = model.tokenizer.encode("so be it", special=False)
    half = model.tokenizer.encode("\U0001f600", special=False)[:1]
    tokens = [*thought, *([] if last == END else half), last]
    found = told(model, sample_of(model, begun=True), tokens)
    assert (found.text, found.reasoning.startswith("so be it")) == ("", True)
    assert found.reasoning_tokens == len(tokens)


def test_a_resumed_text_is_split_where_it_would_have_been(model: Model) -> None:
    thought, answer = (model.tokenizer.encode(text, special=False) for text in ("hm, well", "yes or no"))
    tokens = [OPEN, *thought, CLOSE, *answer]
    whole = told(model, sample_of(model, begun=False), tokens)
    for cut in range(1, len(tokens)):
        first = Transcript(sample_of(model, begun=False), model, 0.0).take(commit_of(tokens[:cut], last=False))
        resumed = Transcript(sample_of(model, begun=False, generated=tokens[:cut]), model, 0.0)
        asyncio.run(resumed.resume(BoundedThreads("resumed texts", 1, 1)))
        rest = resumed.take(commit_of(tokens[cut:], last=True))
        assert (first.reasoning + rest.reasoning, first.text + rest.text) == (whole.reasoning, whole.text)
        assert first.reasoning_tokens + rest.reasoning_tokens == whole.reasoning_tokens
        assert rest.finish.usage.reasoning_tokens == 2 + len(thought)
