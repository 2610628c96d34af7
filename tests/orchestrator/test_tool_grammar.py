"""Forced tool calls: written as the model's template writes them, valid under their schema, and parsed back, in each
tool format."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest

from orchestrator.requests.model import ServedModel
from orchestrator.requests.parsing import parse
from orchestrator.requests.sample import resolved
from orchestrator.requests.tools import MAX_VALUES, tool_grammar, tool_violations
from specdec.engine.model_directory import ModelDirectory
from specdec.grammar.compiler import GrammarCompiler
from specdec.grammar.grammar import MAX_SOURCE_BYTES, Grammar, GrammarError, Kind
from specdec.serving.errors import InvalidRequestError
from specdec.v2 import generation_pb2, model_pb2
from specdec.wire.tool_calls import ToolCall, ToolCallReader
from specdec.wire.tool_formats import FORMATS, MISTRAL_ARGS, QWEN_CODER, TaggedCall, ToolFormat, written
from tests.cpu_time import taking_less_than
from tests.models import make
from tests.text.conversations import model_with
from tests.tool_templates import TEMPLATES


@pytest.mark.parametrize(
    ("inner", "listed"), [({"$ref": "#/$defs/e"}, ["a"] * 6000), ({"type": "integer"}, [1] * 6000)]
)
def test_a_long_list_is_not_written_out_for_every_property(inner: dict[str, Any], listed: list[Any]) -> None:
    schema = {
        "type": "object",
        "properties": {f"p{number}": inner for number in range(1000)},
        "$defs": {"e": {"enum": listed}},
        "additionalProperties": False,
    }
    tool = generation_pb2.Tool(name="f", parameters=json.dumps(schema), strict=True)
    chat = generation_pb2.ChatPrompt(tools=[tool])
    model: Any = SimpleNamespace(takes_tools=True, tool_format=QWEN_CODER, tool_tokens={})
    with taking_less_than(1.0):
        if not tool_violations(chat, model):
            with pytest.raises(GrammarError):
                tool_grammar(chat, model)


WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 5},
        "unit": {"$ref": "#/$defs/unit"},
        "days": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 20}, {"type": "null"}]},
        "area": {"type": "object", "properties": {"a": {"type": "boolean"}}, "additionalProperties": False},
    },
    "$defs": {"unit": {"enum": ["C", "degrees F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, dict[str, Any]] = {"weather": WEATHER, "time": {"type": "object", "additionalProperties": False}}
CALLS = [("weather", {"city": "Köln", "unit": "degrees F", "days": 3, "area": {"a": True}}), ("time", {})]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = make("llama", tmp_path_factory.mktemp("models") / "m")
    (directory / "model.safetensors").unlink()
    return directory


def model_of(source: Path, directory: Path, template: str) -> ServedModel:
    found = model_with(source, directory, {"chat_template.jinja": template})
    assert isinstance(found, ServedModel), found
    return found


@pytest.fixture(params=list(TEMPLATES), ids=lambda each: each.name)
def model(request: pytest.FixtureRequest, source: Path, tmp_path: Path) -> ServedModel:
    return model_of(source, tmp_path / "m", TEMPLATES[request.param])


def chat(schemas: dict[str, dict[str, Any]] = SCHEMAS, **fields: Any) -> generation_pb2.ChatPrompt:
    tools = [generation_pb2.Tool(name=name, parameters=json.dumps(schema)) for name, schema in schemas.items()]
    return generation_pb2.ChatPrompt(tools=tools, **fields)


class Follower:
    """Follows the grammar of a conversation, token by token."""

    def __init__(
        self,
        model: ServedModel,
        directory: Path,
        asked: generation_pb2.ChatPrompt,
        grammar: model_pb2.Grammar | None = None,
    ) -> None:
        assert tool_violations(asked, model) == []
        grammar = grammar or tool_grammar(asked, model)
        assert grammar is not None
        compiler = GrammarCompiler(directory / "tokenizer.json", model.vocabulary)
        self._tokenizer, self._vocabulary = model.tokenizer, model.vocabulary
        self._matcher = compiler.compile(Grammar(Kind.LARK, (grammar.lark,)))._shared.matcher

    def takes(self, text: str) -> bool:
        """Return whether the grammar accepts a whole text."""
        matcher, tokens = self._matcher.deep_copy(), self._tokenizer.encode(text, special=False)
        return (
            matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens) and matcher.is_accepting()
        )

    def text(self, seed: int, most: int = 600) -> str:
        """Draw an accepted text token by token; short texts are likelier to end."""
        matcher, draws, tokens = self._matcher.deep_copy(), random.Random(seed), list[int]()
        while not (matcher.is_accepting() and (draws.random() < 0.5 or matcher.is_stopped())):
            bias = matcher.compute_logit_bias()
            allowed = [token for token, value in enumerate(bias) if value and token > 2]
            tokens.append(draws.choice(allowed))
            assert matcher.consume_token(tokens[-1])
            assert len(tokens) < most
        own = (token for token in tokens if token < self._vocabulary)  # without the library's end token
        return b"".join(map(self._tokenizer.piece, own)).decode(errors="replace")


def read(tool_format: ToolFormat, text: str, schemas: dict[str, dict[str, Any]] = SCHEMAS) -> list[str | ToolCall]:
    reader = ToolCallReader(tool_format, schemas)
    return [*reader.push(text), *reader.finish()]


def test_every_format_has_a_template() -> None:
    assert {each.name for each in TEMPLATES} == set(FORMATS)


def test_a_forced_call_is_as_the_template_writes_it(model: ServedModel, tmp_path: Path) -> None:
    tool_format = model.tool_format
    assert tool_format is not None
    follower = Follower(model, tmp_path / "m", chat(tool_required=True))
    assert follower.takes(written(tool_format, CALLS))
    assert follower.takes(written(tool_format, CALLS[:1]))
    assert not follower.takes("x" + written(tool_format, CALLS))
    assert not follower.takes(written(tool_format, [("weather", {"city": "Köln"})]))
    assert not follower.takes(written(tool_format, [("weather", {"city": "Cologne", "unit": "C"})]))
    named = Follower(model, tmp_path / "m", chat(tool_name="weather"))
    assert named.takes(written(tool_format, CALLS[:1]))
    assert not named.takes(written(tool_format, CALLS[1:]))
    assert not named.takes(written(tool_format, CALLS))


def test_what_the_grammar_allows_is_read_and_fits(model: ServedModel, tmp_path: Path) -> None:
    assert model.tool_format is not None
    follower = Follower(model, tmp_path / "m", chat(tool_required=True))
    for seed in range(20):
        text = follower.text(seed)
        found = read(model.tool_format, text)
        assert found, text
        for call in found:
            assert isinstance(call, ToolCall), (text, call)
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])


def test_a_format_that_is_not_known_is_not_guessed(source: Path, tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}<tool_call>{{ c.function.name }} with {{ "
    )
    template += "c.function.arguments | tojson }}</tool_call>{% endfor %}{% endfor %}{{ tools | tojson }}"
    model = model_of(source, tmp_path / "m", template)
    assert model.tool_format is None
    assert tool_violations(chat(), model) == []
    problem = "is set, the model's chat template has no known format of calls"
    assert tool_violations(chat(tool_required=True), model) == [("chat.tool_required", problem)]
    assert tool_violations(chat(tool_name="time"), model) == [("chat.tool_name", problem)]
    assert tool_violations(chat(single_tool_call=True), model) == [("chat.single_tool_call", problem)]
    strict = chat()
    strict.tools[1].strict = True
    assert tool_violations(strict, model) == [("chat.tools[1].strict", problem)]


def test_a_template_that_takes_no_tools(source: Path, tmp_path: Path) -> None:
    model = model_of(source, tmp_path / "m", "{% for m in messages %}{{ m.content }}{% endfor %} <tool_call> has tools")
    problem = (
        "is set, but the model's chat template supports no tools; --chat-template of the orchestrator sets another"
    )
    assert tool_violations(chat(), model) == [("chat.tools", problem)]


def test_marks_that_are_special_tokens_are_forced_by_their_ids(source: Path, tmp_path: Path) -> None:
    model_of(source, tmp_path / "m", TEMPLATES[MISTRAL_ARGS])
    file = tmp_path / "m" / "tokenizer.json"
    text = file.read_text().replace('"<pad>"', '"[TOOL_CALLS]"').replace('"<s>"', '"[ARGS]"')
    file.write_text(text.replace('"</s>"', '"[CALL_ID]"'))
    model = ServedModel.of(ModelDirectory(tmp_path / "m"))
    assert model.tool_tokens == {"[TOOL_CALLS]": 0, "[ARGS]": 1, "[CALL_ID]": 2}
    follower = Follower(model, tmp_path / "m", chat(tool_required=True))
    call = "[TOOL_CALLS]time{}[ARGS]{{}}"
    assert follower.takes(call.format(""))
    assert follower.takes(call.format("[CALL_ID]abcdef123"))
    assert not follower.takes(call.format("[CALL_ID]"))


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        (
            {"properties": {"a": {"type": "string", "pattern": "a+"}}},
            "has a property a with pattern, which cannot be enforced for a string",
        ),
        ({"properties": {"a b": {}}}, 'has a property "a b", which the model\'s format cannot name'),
        ({"anyOf": [{"required": ["a"]}]}, "has anyOf, which cannot be enforced"),
        ({"required": ["a"]}, 'requires "a", which is not one of its properties'),
        ({"properties": {"a": {"type": "string", "maxLength": "5"}}}, "has a property a with a length that is not an"),
        (
            {"$defs": {"s": {"type": "string"}}, "properties": {"a": {"$ref": "#/$defs/s", "maxLength": 1}}},
            "has a property a with maxLength, which cannot be enforced for a string",
        ),
        ({"properties": {"a": {"type": "string", "minLength": -1}}}, "has a property a with a length that is not an"),
        ({"properties": {"a": {"enum": ["</parameter>"]}}}, "has a property a with a value that"),
        ({"properties": {"a": {"enum": ["x", "a <tool_call>"]}}}, "has a property a with a value that"),
        ({"properties": {"a": {"items": {"$ref": "#"}}}}, "is recursive at its root"),
    ],
)
def test_schemas_that_tagged_calls_cannot_be_held_to(
    source: Path, tmp_path: Path, schema: dict[str, Any], problem: str
) -> None:
    assert isinstance(QWEN_CODER.call, TaggedCall)
    model = model_of(source, tmp_path / "m", TEMPLATES[QWEN_CODER])
    ((field, said),) = tool_violations(chat({"f": {"type": "object", **schema}}, tool_required=True), model)
    assert field == "chat.tools[0].parameters"
    assert said.startswith(problem)
    assert tool_violations(chat({"f": {"type": "object", **schema}}), model) == []


def test_a_length_may_be_written_with_a_fraction(source: Path, tmp_path: Path) -> None:
    model = model_of(source, tmp_path / "m", TEMPLATES[QWEN_CODER])
    bounded = {"type": "object", "properties": {"a": {"type": "string", "minLength": 1.0, "maxLength": 2.0}}}
    follower = Follower(model, tmp_path / "m", chat({"f": bounded}, tool_required=True))
    assert [text for text in ("", "ab", "abc") if follower.takes(written(QWEN_CODER, [("f", {"a": text})]))] == ["ab"]


def test_a_named_tool_is_forced_beside_tools_that_cannot_be(source: Path, tmp_path: Path) -> None:
    model = model_of(source, tmp_path / "m", TEMPLATES[QWEN_CODER])
    schemas = SCHEMAS | {
        "other": {"type": "object", "anyOf": [{"required": ["a"]}]},
        "large": {"type": "object", "description": "x" * MAX_SOURCE_BYTES},
    }
    assert Follower(model, tmp_path / "m", chat(schemas, tool_name="time")).takes(written(QWEN_CODER, CALLS[1:]))
    for name in ("other", "large"):
        assert tool_violations(chat(schemas, tool_name=name), model)


def test_arguments_of_a_function_without_properties(source: Path, tmp_path: Path) -> None:
    """Any arguments, unless the schema forbids them."""
    model = model_of(source, tmp_path / "m", TEMPLATES[QWEN_CODER])
    call = written(QWEN_CODER, [("f", {"a": "b", "c": 5})])
    free = Follower(model, tmp_path / "m", chat({"f": {"type": "object"}}, tool_required=True))
    assert free.takes(call)
    assert free.takes(written(QWEN_CODER, [("f", {})]))
    bound = chat({"f": {"type": "object", "additionalProperties": False}}, tool_required=True)
    assert not Follower(model, tmp_path / "m", bound).takes(call)


@pytest.mark.parametrize(
    "schema",
    [
        {"required": 5},
        {"required": [[], 5]},
        {"properties": 5},
        {"properties": {"a": True, "b": False, "c": None}},
        {"properties": {"a": {"x-guidance": 5}}},
        {"properties": {"a": {"type": 5, "enum": 5, "anyOf": 5}}},
        {"properties": {"a": {"$ref": 5}, "b": {"$ref": "#/$defs/nothing"}, "c": {"anyOf": []}}},
        {"$defs": {"a": {"$ref": "#/$defs/a"}}, "properties": {"a": {"$ref": "#/$defs/a"}}},
        {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 2}}, "properties": {"a": {"$ref": "#/$defs/a"}}},
        {"properties": {"a": {"$ref": "#" + "/a" * 1000}}},
    ],
    ids=lambda schema: json.dumps(schema)[:60],
)
def test_schemas_that_make_no_sense_break_nothing(source: Path, tmp_path: Path, schema: dict[str, Any]) -> None:
    """Invalid schemas are refused, at the latest by the grammar trial."""
    model = model_of(source, tmp_path / "m", TEMPLATES[QWEN_CODER])
    asked = chat({"f": {"type": "object", **schema}}, tool_required=True)
    assert tool_violations(asked, model) or tool_grammar(asked, model) is not None
    text = written(QWEN_CODER, [("f", {"a": "5"})])
    assert all(isinstance(call, ToolCall) for call in read(QWEN_CODER, text, {"f": schema}))


def test_an_argument_that_may_not_be_is_not_forced(source: Path, tmp_path: Path) -> None:
    model = model_of(source, tmp_path / "m", TEMPLATES[QWEN_CODER])
    schema = {"f": {"type": "object", "properties": {"a": False, "b": True}}}
    follower = Follower(model, tmp_path / "m", chat(schema, tool_required=True))
    assert follower.takes(written(QWEN_CODER, [("f", {"b": 5})]))
    assert not follower.takes(written(QWEN_CODER, [("f", {"a": 5})]))


ANSWER = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 7}, "degrees": {"type": "integer", "maximum": 9}},
    "required": ["name"],
    "additionalProperties": False,
}
ANSWERS = ['{"name": "weather", "degrees": 5}', '{"name": "x"}']


def answering(asked: generation_pb2.ChatPrompt, model: ServedModel, directory: Path, **answer: Any) -> Follower:
    found = tool_grammar(asked, model, model_pb2.Grammar(**(answer or {"json_schema": json.dumps(ANSWER)})))
    assert found is not None
    return Follower(model, directory, asked, found)


def test_a_text_is_calls_or_an_answer(model: ServedModel, tmp_path: Path) -> None:
    assert model.tool_format is not None
    follower = answering(chat(), model, tmp_path / "m")
    assert all(map(follower.takes, ANSWERS))
    assert follower.takes(written(model.tool_format, CALLS))
    assert follower.takes(written(model.tool_format, [("weather", {"city": "a longer city"})]))  # not strict
    assert not follower.takes("x")
    assert not follower.takes('{"degrees": 5}')
    assert not follower.takes(ANSWERS[0] + written(model.tool_format, CALLS))
    assert not follower.takes(written(model.tool_format, [("other", {})]))


def test_strict_calls_beside_an_answer_fit_their_schema(model: ServedModel, tmp_path: Path) -> None:
    assert model.tool_format is not None
    asked = chat(single_tool_call=True)
    for tool in asked.tools:
        tool.strict = True
    follower = answering(asked, model, tmp_path / "m")
    assert follower.takes(ANSWERS[0])
    assert follower.takes(written(model.tool_format, CALLS[:1]))
    assert not follower.takes(written(model.tool_format, CALLS))
    assert not follower.takes(written(model.tool_format, [("weather", {"city": "a longer city", "unit": "C"})]))
    for seed in range(10):
        text = follower.text(seed)
        for item in read(model.tool_format, text):
            schema = SCHEMAS[item.name] if isinstance(item, ToolCall) else ANSWER
            jsonschema.validate(json.loads(item.arguments if isinstance(item, ToolCall) else item), schema)


def test_a_forced_call_leaves_no_answer(model: ServedModel, tmp_path: Path) -> None:
    assert model.tool_format is not None
    follower = answering(chat(tool_required=True), model, tmp_path / "m")
    assert follower.takes(written(model.tool_format, CALLS))
    assert not any(map(follower.takes, ANSWERS))


def test_other_answers_beside_calls(model: ServedModel, tmp_path: Path) -> None:
    assert model.tool_format is not None
    calls = written(model.tool_format, CALLS)
    expression = answering(chat(), model, tmp_path / "m", regex=r"a/b\/(?:c|d)*")
    assert expression.takes("a/b/cd")
    assert expression.takes(calls)
    assert not expression.takes("a/b")
    choice = answering(chat(), model, tmp_path / "m", choice=model_pb2.Choice(texts=["yes", 'n"o']))
    assert choice.takes('n"o')
    assert choice.takes(calls)
    assert not choice.takes("n")
    with pytest.raises(GrammarError, match="is in Lark, which cannot be combined with tools"):
        tool_grammar(chat(), model, model_pb2.Grammar(lark='start: "a"'))


def test_an_answer_keeps_its_beginning(model: ServedModel) -> None:
    answer = model_pb2.Grammar(json_schema="{}", after_token=5, opening_token=4)
    found = tool_grammar(chat(), model, answer)
    assert found is not None
    assert (found.after_token, found.opening_token) == (5, 4)
    assert tool_grammar(generation_pb2.ChatPrompt(), model, answer) is answer


def test_a_call_that_was_cut_short_may_be_sent_back(model: ServedModel) -> None:
    def prompt_with(arguments: str) -> list[int]:
        call = generation_pb2.ToolCall(id="abcdefghi", name="weather", arguments=arguments)
        turns = [
            generation_pb2.ChatMessage(role="user", content="how warm?"),
            generation_pb2.ChatMessage(role="assistant", tool_calls=[call]),
            generation_pb2.ChatMessage(role="user", content="go on"),
        ]
        asked = generation_pb2.GenerateRequest(chat=generation_pb2.ChatPrompt(messages=turns), max_tokens=1)
        return list(parse(asked, model).samples[0].prompt)

    assert prompt_with('{"city": "K\\u00f6') == prompt_with('{"city": "K\\u00f6"}') != prompt_with("{}")
    assert prompt_with('{"city') == prompt_with("{}") == prompt_with("")
    with pytest.raises(InvalidRequestError, match=r"arguments: is not a JSON object, or the beginning of one"):
        prompt_with("city")


def test_an_answer_beside_tools_is_held_to_its_whole_schema(source: Path, tmp_path: Path) -> None:
    """The text may be a call, which the check of a finished answer could mistake for an answer."""
    asked = chat({"f": {"type": "object"}}, messages=[generation_pb2.ChatMessage(role="user", content="hi")])
    schema = json.dumps({"type": "array", "items": {"type": "string"}, "uniqueItems": True})
    model = model_of(source, tmp_path / "m", next(iter(TEMPLATES.values())))
    with pytest.raises(
        InvalidRequestError, match=r"json_schema: /uniqueItems: cannot be enforced: items must be an enum"
    ):
        parse(generation_pb2.GenerateRequest(chat=asked, json_schema=schema), model)


def test_json_of_too_many_values_is_not_parsed(model: ServedModel) -> None:
    """Signs in strings, such as those of code, do not count."""

    def problems(arguments: str) -> list[tuple[str, str]]:
        call = generation_pb2.ToolCall(id="a", name="weather", arguments=arguments)
        asked = chat()
        asked.messages.append(generation_pb2.ChatMessage(role="assistant", tool_calls=[call]))
        return tool_violations(asked, model)

    many = MAX_VALUES // 2 + 1
    assert problems(json.dumps({"a": "[{,:" * many})) == []
    ((field, problem),) = problems('{"a": [' + "[]," * many + "0]}")
    assert field == "chat.messages"
    assert problem.endswith(f"values in JSON, must have at most {MAX_VALUES}")


def test_the_format_of_calls_is_resolved_for_texts_with_tools(model: ServedModel) -> None:
    asked = chat({"f": {}}, messages=[generation_pb2.ChatMessage(role="user", content="hi")])
    for tools in (True, False):
        (sample,) = parse(generation_pb2.GenerateRequest(chat=asked), model).samples
        assert model.tool_format is not None
        assert resolved(sample, "").tool_format == (model.tool_format.name if tools else "")
        asked.ClearField("tools")


def test_an_unclosed_string_is_scanned_once(source: Path, tmp_path: Path) -> None:
    """A search after each of its quotes would take a second here, and hold the GIL meanwhile."""
    arguments = "[" * (MAX_VALUES + 1) + '"' + '\\"' * 10_000
    call = generation_pb2.ToolCall(id="a", name="weather", arguments=arguments)
    asked = chat(messages=[generation_pb2.ChatMessage(role="assistant", tool_calls=[call])])
    model = model_of(source, tmp_path / "m", next(iter(TEMPLATES.values())))
    with taking_less_than(0.1):
        ((field, _),) = tool_violations(asked, model)
    assert field == "chat.messages"
