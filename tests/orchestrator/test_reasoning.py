"""Reasoning support is detected from the chat template; the end of the prompt shows whether an answer starts in
reasoning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.requests.model import ServedModel
from orchestrator.requests.parsing import parse
from orchestrator.requests.reasoning import Reasoning
from specdec.engine.model_directory import ModelDirectory
from specdec.serving.errors import InvalidRequestError
from specdec.v2 import generation_pb2, model_pb2
from tests.models import END, make
from tests.reasoning import CLOSE, OPEN, TEMPLATE, reasoning_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    root = tmp_path_factory.mktemp("model")
    return ServedModel.of(ModelDirectory(reasoning_model(make("llama", root / "plain"), root / "reasons")))


def request_of(turns: Any, arguments: dict[str, Any], **fields: Any) -> generation_pb2.GenerateRequest:
    chat = generation_pb2.ChatPrompt(messages=[generation_pb2.ChatMessage(**turn) for turn in turns])
    chat.template_arguments.update(arguments)
    return generation_pb2.GenerateRequest(chat=chat, **fields)


ASKED = [{"role": "user", "content": "what is </think> or <think>?"}]


@pytest.mark.parametrize(
    ("arguments", "begun"), [({}, False), ({"opened": True}, True), ({"enable_thinking": False}, None)]
)
def test_the_end_of_the_prompt_says_how_an_answer_begins(
    model: ServedModel, arguments: dict[str, Any], begun: bool | None
) -> None:
    """Marks inside messages are ignored."""
    reasoning = parse(request_of(ASKED, arguments), model).samples[0].reasoning
    assert (None if reasoning is None else reasoning.begun) == begun


def test_only_chats_are_split(model: ServedModel) -> None:
    (sample,) = parse(generation_pb2.GenerateRequest(text="<think>\n"), model).samples
    assert sample.reasoning is None


def test_a_grammar_is_about_the_answer(model: ServedModel) -> None:
    """Unless the request itself sets the token after which the grammar applies."""
    grammar = model_pb2.Grammar(regex="a+")
    for arguments, expected in (
        ({}, model_pb2.Grammar(regex="a+", after_token=CLOSE, opening_token=OPEN)),
        ({"opened": True}, model_pb2.Grammar(regex="a+", after_token=CLOSE)),
        ({"enable_thinking": False}, grammar),
    ):
        assert parse(request_of(ASKED, arguments, grammar=grammar), model).samples[0].grammar == expected
    own = model_pb2.Grammar(regex="a+", after_token=70)
    assert parse(request_of(ASKED, {}, grammar=own), model).samples[0].grammar == own
    with pytest.raises(InvalidRequestError, match=r"grammar\.opening_token: is set, which requires after_token"):
        parse(request_of(ASKED, {}, grammar=model_pb2.Grammar(regex="a+", opening_token=5)), model)


def test_a_grammar_begins_at_the_same_token_if_the_reasoning_is_not_split(model: ServedModel) -> None:
    none = generation_pb2.Reasoning(none=True)
    for arguments in ({}, {"opened": True}, {"enable_thinking": False}):
        split, whole = (
            parse(request_of(ASKED, arguments, grammar=model_pb2.Grammar(regex="a+"), **fields), model).samples[0]
            for fields in ({}, {"reasoning": none})
        )
        assert whole.reasoning is None
        assert whole.grammar == split.grammar
    plain = generation_pb2.GenerateRequest(text="abc", reasoning=none, grammar=model_pb2.Grammar(regex="a+"))
    assert parse(plain, model).samples[0].grammar == model_pb2.Grammar(regex="a+")


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        (
            {"stop": ["x", "</think>"]},
            rf"^stop: contains the closing token of the reasoning \({CLOSE}\).* never apply$",
        ),
        (
            {"stop": ["x", "</think>"], "reasoning": generation_pb2.Reasoning(none=True)},
            rf"^stop: contains the closing token of the reasoning \({CLOSE}\)",
        ),
        ({"stop_tokens": [CLOSE]}, r"^stop_tokens: contains the closing token of the reasoning"),
        ({"stop_tokens": [OPEN]}, r"^stop_tokens: contains the opening token .* begins with it would end at once$"),
        ({"after": 70, "stop_tokens": [70]}, r"^grammar\.after_token: is 70, which ends the text"),
        ({"closing": END, "stop": ["x"]}, rf"^reasoning\.closing_token: is {END}, which ends the text"),
    ],
)
def test_a_grammar_whose_marks_end_the_text_is_refused(
    model: ServedModel, fields: dict[str, Any], problem: str
) -> None:
    """No token may end the text before the mark, so the mark could never come. The refusal names what the caller
    set."""
    grammar = model_pb2.Grammar(regex="a+", after_token=fields.pop("after", None))
    if closing := fields.pop("closing", None):
        fields["reasoning"] = generation_pb2.Reasoning(opening_token=OPEN, closing_token=closing)
    with pytest.raises(InvalidRequestError, match=problem):
        parse(request_of(ASKED, {}, grammar=grammar, **fields), model)


def test_a_request_may_say_where_its_reasoning_is(model: ServedModel) -> None:
    """A request can override the detection, for its prompt and its grammar."""
    said = generation_pb2.Reasoning(opening_token=70, closing_token=71, begun=True)
    request = generation_pb2.GenerateRequest(text="abc", reasoning=said, grammar=model_pb2.Grammar(regex="a+"))
    (sample,) = parse(request, model).samples
    assert sample.reasoning == Reasoning(70, 71, begun=True)
    assert sample.grammar == model_pb2.Grammar(regex="a+", after_token=71)
    none = generation_pb2.Reasoning(none=True)
    assert parse(request_of(ASKED, {}, reasoning=none), model).samples[0].reasoning is None
    said.closing_token = 9999
    with pytest.raises(InvalidRequestError, match=r"reasoning\.closing_token: is 9999, must be a token id below"):
        parse(generation_pb2.GenerateRequest(text="abc", reasoning=said), model)


def test_the_template_sees_the_reasoning_of_earlier_turns(model: ServedModel) -> None:
    turns = [*ASKED, {"role": "assistant", "content": "a mark", "reasoning": "hm"}, *ASKED]
    text = model.tokenizer.decode(parse(request_of(turns, {}), model).samples[0].prompt)
    assert "assistant: (hm) a mark" in text


@pytest.mark.parametrize("without", ["template", "token"])
def test_other_models_have_no_reasoning(tmp_path: Path, without: str) -> None:
    """The template may lack the marks, or the vocabulary may."""
    directory = reasoning_model(make("llama", tmp_path / "plain"), tmp_path / "reasons")
    if without == "template":
        settings = json.loads((directory / "tokenizer_config.json").read_text())
        settings["chat_template"] = TEMPLATE.replace("</think>", "")
        (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    else:
        file = directory / "tokenizer.json"
        file.write_text(file.read_text().replace("</think>", "</thought>"))
    model = ServedModel.of(ModelDirectory(directory))
    assert model.reasoning_marks is None
    assert parse(request_of(ASKED, {}), model).samples[0].reasoning is None
