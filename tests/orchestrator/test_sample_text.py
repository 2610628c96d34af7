"""A text is split into reasoning and answer at the marks; the readable part of each is exactly the text of its
tokens."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.requests.model import ServedModel
from orchestrator.requests.parsing import parse
from orchestrator.requests.reasoning import Reasoning
from orchestrator.requests.sample import Sample
from orchestrator.text.sample_text import MAX_SPACE_BEFORE_MARK
from orchestrator.text.transcript import SampleTranscript
from specdec.engine.model_directory import ModelDirectory
from specdec.serving.bounded_threads import BoundedThreads
from specdec.v2 import generation_pb2, model_pb2, verifier_pb2
from tests.models import VOCABULARY, make
from tests.reasoning import reasoning_model

OPEN, CLOSE, END = 0, 1, 2
PARTS = st.lists(st.integers(3, VOCABULARY - 1), max_size=30)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    directory: Path = make("llama", tmp_path_factory.mktemp("model") / "m")
    return ServedModel.of(ModelDirectory(directory))


@pytest.fixture(scope="module")
def reasoning(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    root = tmp_path_factory.mktemp("reasoning")
    return ServedModel.of(ModelDirectory(reasoning_model(make("llama", root / "plain"), root / "reasons")))


def sample_of(model: ServedModel, *, begun: bool, **fields: Any) -> Sample:
    (sample,) = parse(generation_pb2.GenerateRequest(text="abc"), model).samples
    return replace(sample, **{"reasoning": Reasoning(OPEN, CLOSE, begun), **fields})


def commit_of(tokens: list[int], *, last: bool) -> verifier_pb2.Commit:
    reason = model_pb2.FINISH_REASON_STOP if tokens[-1:] == [END] else model_pb2.FINISH_REASON_LENGTH
    return verifier_pb2.Commit(
        committed=model_pb2.Committed(tokens=tokens),
        sources=[model_pb2.TOKEN_SOURCE_PLAIN] * len(tokens),
        steps=len(tokens),
        finish_reason=reason if last else model_pb2.FINISH_REASON_UNSPECIFIED,
    )


def told(model: ServedModel, sample: Sample, tokens: list[int]) -> generation_pb2.GenerateResponse:
    """Return the response to a text whose tokens all come in one commit."""
    response = SampleTranscript(sample, model, 0.0).add_commit(commit_of(tokens, last=True))
    assert response is not None
    assert "".join(response.token_texts) == response.reasoning + response.text
    assert response.reasoning_tokens == response.finish.usage.reasoning_tokens
    return response


@given(begun=st.booleans(), reasoning=PARTS, answer=PARTS)
def test_it_is_split_at_the_marks(model: ServedModel, begun: bool, reasoning: list[int], answer: list[int]) -> None:
    decode = model.tokenizer.decode
    tokens = [*([] if begun else [OPEN]), *reasoning, CLOSE]
    found = told(model, sample_of(model, begun=begun), [*tokens, *answer])
    assert (found.reasoning, found.text) == (decode(reasoning).lstrip(), decode(answer).lstrip())
    assert found.reasoning_tokens == len(tokens)


@given(answer=PARTS)
def test_an_answer_that_a_grammar_is_about_loses_nothing(model: ServedModel, answer: list[int]) -> None:
    """The grammar may require leading white space."""
    sample = sample_of(model, begun=True, grammar=model_pb2.Grammar(regex=" yes"))
    space = model.tokenizer.encode(" ", special=False)
    found = told(model, sample, [70, CLOSE, *space, *answer])
    assert found.text == model.tokenizer.decode([*space, *answer])


@given(answer=PARTS)
def test_a_text_that_does_not_begin_with_the_mark_has_no_reasoning(model: ServedModel, answer: list[int]) -> None:
    """Even if a mark occurs later."""
    tokens = [70, *answer, OPEN, *answer, CLOSE, 70]
    marked = told(model, sample_of(model, begun=False), tokens)
    assert marked.text == told(model, sample_of(model, begun=False, reasoning=None), tokens).text
    assert marked.reasoning_tokens == 0


def test_stop_strings_end_the_answer_alone(model: ServedModel) -> None:
    b, c = model.tokenizer.encode("bc", special=False)
    found = told(model, sample_of(model, begun=True, stop=("bc",)), [b, c, CLOSE, c, b, c, b])
    assert (found.reasoning, found.text, found.finish.stop) == ("bc", "c", "bc")
    assert list(found.tokens) == [b, c, CLOSE, c, b, c]


@pytest.mark.parametrize(("least", "text"), [(5, "c"), (6, "cbcb"), (7, "cbcb")])
def test_the_minimum_of_tokens_counts_the_reasoning(model: ServedModel, least: int, text: str) -> None:
    b, c = model.tokenizer.encode("bc", special=False)
    sample = sample_of(model, begun=True, stop=("bc",), min_tokens=least)
    assert told(model, sample, [b, c, CLOSE, c, b, c, b]).text == text


@pytest.mark.parametrize("last", [END, 70])
def test_reasoning_that_never_ends_is_no_answer(model: ServedModel, last: int) -> None:
    """The reasoning includes text held back at the end, and the end token."""
    thought = model.tokenizer.encode("so be it", special=False)
    half = model.tokenizer.encode("\U0001f600", special=False)[:1]
    tokens = [*thought, *([] if last == END else half), last]
    found = told(model, sample_of(model, begun=True), tokens)
    assert (found.text, found.reasoning.startswith("so be it")) == ("", True)
    assert found.reasoning_tokens == len(tokens)


def test_a_resumed_text_is_split_where_it_would_have_been(model: ServedModel) -> None:
    thought, answer = (model.tokenizer.encode(text, special=False) for text in ("hm, well", "yes or no"))
    tokens = [OPEN, *thought, CLOSE, *answer]
    whole = told(model, sample_of(model, begun=False), tokens)
    for cut in range(1, len(tokens)):
        first = SampleTranscript(sample_of(model, begun=False), model, 0.0).add_commit(
            commit_of(tokens[:cut], last=False)
        )
        resumed = SampleTranscript(sample_of(model, begun=False, generated=tokens[:cut]), model, 0.0)
        asyncio.run(resumed.resume(BoundedThreads("resumed texts", 1, 1)))
        rest = resumed.add_commit(commit_of(tokens[cut:], last=True))
        assert first is not None
        assert rest is not None
        assert (first.reasoning + rest.reasoning, first.text + rest.text) == (whole.reasoning, whole.text)
        assert first.reasoning_tokens + rest.reasoning_tokens == whole.reasoning_tokens
        assert rest.finish.usage.reasoning_tokens == 2 + len(thought)


def in_pieces(model: ServedModel, sample: Sample, tokens: list[int]) -> list[generation_pb2.GenerateResponse]:
    """Return the responses to a text whose tokens come one by one, until it ends."""
    transcript = SampleTranscript(sample, model, 0.0)
    told = []
    for count, token in enumerate(tokens, 1):
        response = transcript.add_commit(commit_of([token], last=count == len(tokens)))
        if response is not None:
            told.append(response)
            if response.HasField("finish"):
                break
    return told


@given(space=st.text(" \n", max_size=MAX_SPACE_BEFORE_MARK), reasoning=PARTS, answer=PARTS)
def test_reasoning_may_begin_after_white_space(
    model: ServedModel, space: str, reasoning: list[int], answer: list[int]
) -> None:
    """Models write a line break before the mark; it belongs to the reasoning, however tokens are split."""
    before = [token for character in space for token in model.tokenizer.encode(character, special=False)]
    thought = [*before, OPEN, *reasoning, CLOSE]
    whole = told(model, sample_of(model, begun=False), [*thought, *answer])
    decode = model.tokenizer.decode
    assert (whole.reasoning, whole.text) == (decode(reasoning).lstrip(), decode(answer).lstrip())
    assert whole.reasoning_tokens == len(thought)
    parts = in_pieces(model, sample_of(model, begun=False), [*thought, *answer])
    assert "".join(each.reasoning for each in parts) == whole.reasoning
    assert "".join(each.text for each in parts) == whole.text
    assert [token for each in parts for token in each.tokens] == list(whole.tokens)
    assert sum(each.reasoning_tokens for each in parts) == len(thought)
    assert sum(each.steps for each in parts) == len(whole.tokens)
    assert all(len(each.tokens) == len(each.token_texts) == len(each.sources) for each in parts)
    assert all(each.reasoning_tokens <= len(each.tokens) for each in parts)


@pytest.mark.parametrize("tokens", ["  x", "\n" * (MAX_SPACE_BEFORE_MARK + 1) + "x", "\n\n"])
def test_white_space_that_no_mark_follows_is_the_answers(model: ServedModel, tokens: str) -> None:
    """A mark after more white space than models write belongs to the answer too."""
    text = [token for character in tokens for token in model.tokenizer.encode(character, special=False)]
    for behind in ([], [OPEN, *text]):
        if behind and len(text) <= MAX_SPACE_BEFORE_MARK and not tokens.endswith("x"):
            continue
        parts = in_pieces(model, sample_of(model, begun=False), [*text, *behind])
        assert "".join(each.text for each in parts) == model.tokenizer.decode([*text, *behind])
        assert not any(each.reasoning_tokens for each in parts)


def test_a_stop_string_of_white_space_ends_the_text_at_its_token(model: ServedModel) -> None:
    space, x = model.tokenizer.encode(" x", special=False)
    parts = in_pieces(model, sample_of(model, begun=False, stop=(" ",)), [space, x, x])
    assert [list(each.tokens) for each in parts] == [[space]]
    assert parts[0].finish.stop == " "


def test_under_a_grammar_the_mark_is_the_first_token(model: ServedModel) -> None:
    """The grammar applies from the first token after the mark."""
    space, x = model.tokenizer.encode(" x", special=False)
    sample = sample_of(model, begun=False, grammar=model_pb2.Grammar(regex=" x"))
    parts = in_pieces(model, sample, [space, x])
    assert ["".join(each.text for each in parts), len(parts)] == [" x", 2]


# --- stop strings that are tokens ------------------------------------------------------------------------


def asked(model: ServedModel, stop: list[str], **fields: Any) -> Sample:
    (sample,) = parse(generation_pb2.GenerateRequest(text="abc", stop=stop, **fields), model).samples
    return sample


def test_a_stop_string_that_is_a_special_token_is_an_end_token(model: ServedModel) -> None:
    sample = asked(model, ["<s>", "b"], ignore_end_token=True)
    assert sample.end_tokens == {1}
    a, b = model.tokenizer.encode("ab", special=False)
    commit = commit_of([a, a, 1], last=True)
    commit.finish_reason = model_pb2.FINISH_REASON_STOP
    ended = SampleTranscript(sample, model, 0.0).add_commit(commit)
    assert ended is not None
    assert (ended.text, ended.finish.stop, len(ended.tokens)) == ("aa", "<s>", 3)
    found = told(model, sample, [a, b, a])
    assert (found.text, found.finish.stop, len(found.tokens)) == ("a", "b", 2)


@pytest.mark.parametrize("stop", ["<think>", "</think>"])
def test_a_stop_string_may_be_a_mark_of_reasoning(reasoning: ServedModel, stop: str) -> None:
    """A mark used as a stop string ends the text anywhere, and is not shown."""
    chat = generation_pb2.ChatPrompt(messages=[generation_pb2.ChatMessage(role="user", content="what?")])
    (sample,) = parse(generation_pb2.GenerateRequest(chat=chat, stop=[stop]), reasoning).samples
    mark = {"<think>": OPEN, "</think>": CLOSE}[stop]
    assert mark in sample.end_tokens
    thought = reasoning.tokenizer.encode("so", special=False)
    tokens = [OPEN] if mark == OPEN else [OPEN, *thought, CLOSE]
    commit = commit_of(tokens, last=True)
    commit.finish_reason = model_pb2.FINISH_REASON_STOP
    found = SampleTranscript(sample, reasoning, 0.0).add_commit(commit)
    assert found is not None
    assert (found.finish.stop, found.reasoning, found.text) == (stop, "so" if mark == CLOSE else "", "")
    assert found.finish.usage.reasoning_tokens == len(tokens) - (mark == OPEN)


def test_a_stop_string_may_contain_the_closing_mark(reasoning: ServedModel) -> None:
    """Past the mark, stop strings are matched on the raw answer, including white space that is not shown."""
    sample = sample_of(reasoning, begun=True, stop=("</think>\n\nyes",))
    text = reasoning.tokenizer.encode("\n\nyes, sir", special=False)
    found = told(reasoning, sample, [70, CLOSE, *text])
    assert (found.text, found.finish.stop) == ("", "</think>\n\nyes")
    assert told(reasoning, sample, [70, CLOSE, *text[2:]]).text == "yes, sir"
