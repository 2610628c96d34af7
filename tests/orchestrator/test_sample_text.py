"""A text is split into reasoning and answer at the marks, and what is readable of each is exactly what its tokens
spell."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.model import Model
from orchestrator.reasoning import Reasoning
from orchestrator.request import parse
from orchestrator.sample import Sample
from orchestrator.sample_text import SampleText
from orchestrator.transcript import Transcript
from specdec.engine.model_directory import ModelDirectory
from specdec.v2 import generation_pb2, model_pb2, verifier_pb2
from tests.models import VOCABULARY, make

OPEN, CLOSE, END = 0, 1, 2
PARTS = st.lists(st.integers(3, VOCABULARY - 1), max_size=30)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    directory: Path = make("llama", tmp_path_factory.mktemp("model") / "m")
    return Model.of(ModelDirectory(directory))


def sample_of(model: Model, *, begun: bool, **fields: object) -> Sample:
    (sample,) = parse(generation_pb2.GenerateRequest(text="abc"), model).samples
    return replace(sample, reasoning=Reasoning(OPEN, CLOSE, begun=begun), **fields)  # type: ignore[arg-type]


def split(text: SampleText, tokens: list[int]) -> tuple[str, str]:
    """Spell all tokens; return the reasoning and the answer."""
    parts = ["", ""]
    for token in tokens:
        before = text.reasoning_tokens
        spelt = text.push(token)
        parts[text.reasoning_tokens == before] += spelt.text
    parts[not text._in_reasoning] += text.finish().text
    return parts[0], parts[1]


@given(begun=st.booleans(), reasoning=PARTS, answer=PARTS)
def test_it_is_split_at_the_marks(model: Model, begun: bool, reasoning: list[int], answer: list[int]) -> None:
    decode = model.tokenizer.decode
    text = SampleText(sample_of(model, begun=begun), model.tokenizer)
    tokens = [*([] if begun else [OPEN]), *reasoning, CLOSE]
    found = split(text, [*tokens, *answer])
    assert found == (decode(reasoning).lstrip(), decode(answer).lstrip())
    assert text.reasoning_tokens == len(tokens)


@given(answer=PARTS)
def test_a_text_that_does_not_begin_with_the_mark_has_no_reasoning(model: Model, answer: list[int]) -> None:
    """Wherever a mark stands in it later."""
    marked, plain = (
        SampleText(sample, model.tokenizer)
        for sample in (sample_of(model, begun=False), replace(sample_of(model, begun=False), reasoning=None))
    )
    tokens = [70, *answer, OPEN, *answer, CLOSE]
    assert split(marked, tokens) == split(plain, tokens)
    assert marked.reasoning_tokens == 0


def test_stop_strings_end_the_answer_alone(model: Model) -> None:
    b, c = model.tokenizer.encode("b", special=False), model.tokenizer.encode("c", special=False)
    text = SampleText(sample_of(model, begun=True, stop=("bc",)), model.tokenizer)
    for token in [*b, *c, CLOSE, *c, *b]:
        assert not text.push(token).stop
    assert text.push(c[0]).stop == "bc"


@pytest.mark.parametrize("last", [END, 70])
def test_reasoning_that_never_ends_is_no_answer(model: Model, last: int) -> None:
    """What is held back at the end, and the end token, belong to it as well."""
    thought = model.tokenizer.encode("so be it", special=False)
    half = model.tokenizer.encode("\U0001f600", special=False)[:1]
    tokens = [*thought, *([] if last == END else half), last]
    ended = last == END
    commit = verifier_pb2.Commit(
        committed=model_pb2.Committed(tokens=tokens),
        sources=[model_pb2.TOKEN_SOURCE_PLAIN] * len(tokens),
        finish_reason=model_pb2.FINISH_REASON_STOP if ended else model_pb2.FINISH_REASON_LENGTH,
    )
    response = Transcript(sample_of(model, begun=True), model).take(commit)
    assert (response.text, response.reasoning.startswith("so be it")) == ("", True)
    assert response.reasoning_tokens == response.finish.usage.reasoning_tokens == len(tokens)
    assert "".join(response.token_texts) == response.reasoning


def test_a_resumed_text_is_split_where_it_would_have_been(model: Model) -> None:
    thought, answer = (model.tokenizer.encode(text, special=False) for text in ("hm, well", "yes or no"))
    tokens = [OPEN, *thought, CLOSE, *answer]
    for cut in range(len(tokens)):
        whole, resumed = (SampleText(sample_of(model, begun=False), model.tokenizer) for _ in range(2))
        for token in tokens[:cut]:
            whole.push(token)
            resumed.push(token)
        assert split(whole, tokens[cut:]) == split(resumed, tokens[cut:])
        assert resumed.reasoning_tokens == 2 + len(thought)
