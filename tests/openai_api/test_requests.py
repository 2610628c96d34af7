"""Every field of a body is honoured, ignored without effect, or refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_params

from specdec.client import InvalidRequest
from specdec.openai_api.errors import ApiError, from_specdec
from specdec.openai_api.fields import OF_CHAT, OF_COMPLETIONS, READ, RENAMED, SAME, UNSUPPORTED, WITHOUT_EFFECT
from specdec.openai_api.json_text import Json
from specdec.openai_api.parsing import fields_of
from specdec.openai_api.requests import ParsedRequest, parse_fields

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
TOOL_F = {"type": "function", "function": {"name": "f"}}
MESSAGES = [{"role": "user", "content": "hello"}]
TAGS = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
CALLING = {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}] * 3000}


def chat(**fields: Any) -> ParsedRequest:
    return parse_fields(fields_of(json.dumps({"model": "m", "messages": MESSAGES} | fields).encode()), chat=True)


def completion(**fields: Any) -> ParsedRequest:
    return parse_fields(fields_of(json.dumps({"model": "m", "prompt": "def"} | fields).encode()), chat=False)


@pytest.mark.parametrize(
    ("fields", "param", "problem"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function", "tools[0].function = null: must have a name"),
        ({"tools": [{"type": "custom"}]}, "tools[0]", 'must have the type "function"'),
        ({"tools": "f"}, "tools", "must be a list"),
        ({"tools": [TOOL], "tool_choice": "maybe"}, "tool_choice", "not one of auto"),
        ({"tools": [TOOL], "parallel_tool_calls": 5}, "parallel_tool_calls", "parallel_tool_calls = "),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tool_choice": "maybe"}, "tool_choice", 'is "maybe", must be auto, none, required, or a function'),
        ({"response_format": {"type": "yaml"}}, "response_format.type", 'is "yaml", must be text, json_object, json'),
        ({"response_format": "json_object"}, "response_format", 'is "json_object", must be an object whose type is'),
        (
            {"response_format": {"type": "json_schema", "json_schema": {}}},
            "response_format.json_schema.schema",
            "is missing, must be an object",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "an object with a schema"),
        ({"structured_outputs": {"yaml": "a"}}, "structured_outputs.yaml", "one of choice, grammar, json, json_object"),
        ({"response_format": {"type": "json"}}, "response_format.value", "must be a schema"),
        (
            {"structured_outputs": {"json": {"x-guidance": 1}, "whitespace_pattern": " "}},
            "structured_outputs.json.x-guidance",
            "is 1, must be an object",
        ),
        (
            {"structured_outputs": {"structural_tag": "[" * 200_000}},
            "structured_outputs.structural_tag",
            "has 200000 characters, must have at most 131072",
        ),
        ({"response_format": {"type": "json", "value": {}, "x": 1}}, "response_format.x", "unknown parameter"),
        ({"response_format": {"type": "json_object", "schema": 5}}, "response_format.schema", "must be an object"),
        ({"response_format": {"type": "json_object", "value": 5}}, "response_format.value", "must be an object"),
        (
            {"response_format": {"type": "json_object", "value": {}, "schema": {}}},
            "response_format.schema",
            "unknown parameter",
        ),
        ({"response_format": {"type": "json_object", "shema": {}}}, "response_format.shema", "unknown parameter"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema", "unknown parameter"),
        ({"response_format": {"type": "json_schema", "schema": {}}}, "response_format.schema", "unknown parameter"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "x": 1}}},
            "response_format.json_schema.x",
            "unknown parameter",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": "yes"}}},
            "response_format.json_schema.strict",
            "must be true or false",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"items": TAGS}, "strict": True}}},
            "response_format",
            "maxItems at most 1: remove uniqueItems or strict; without strict",
        ),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "must have one constraint"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
            "none with response_format",
        ),
        ({"structured_outputs": {"structural_tag": "{"}}, "structured_outputs.structural_tag", "must be an object"),
        (
            {"structured_outputs": {"structural_tag": "{}"}},
            "structured_outputs.structural_tag.triggers",
            "list of texts",
        ),
        (
            {"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}},
            "response_format.format",
            "use structures and triggers",
        ),
        (
            {"response_format": {"type": "structural_tag", "triggers": ["<f"], "structures": [{"begin": "<g"}]}},
            "response_format.structures[0]",
            "must be an object with begin, schema and end",
        ),
        (
            {
                "response_format": {
                    "type": "structural_tag",
                    "triggers": ["<f"],
                    "structures": [{"begin": "<g", "schema": {}, "end": "</g>"}],
                }
            },
            "response_format.structures[0].begin",
            "must begin with one of the triggers",
        ),
        (
            {"structured_outputs": {"json": {}, "disable_additional_properties": True}},
            "structured_outputs.disable_additional_properties",
            "set additionalProperties to false",
        ),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object", "must be true or false"),
        (
            {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
            "structured_outputs.whitespace_pattern",
            "needs json",
        ),
        (
            {"structured_outputs": {"grammar": "root ::= word"}},
            "structured_outputs.grammar",
            "line 1, column 10: there is no rule word",
        ),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex", "structured_outputs.regex = 5"),
        ({"structured_outputs": 5}, "structured_outputs", "must be an object"),
        ({"store": True}, "store", "is not supported: use /v1/responses"),
        ({"guided_regex": "a"}, "guided_regex", "use structured_outputs"),
        ({"mirostat": 2}, "mirostat", "is not supported"),
        ({"skip_special_tokens": 0}, "skip_special_tokens", "must be true or false"),
        ({"include_stop_str_in_output": 1}, "include_stop_str_in_output", "must be true or false"),
        ({"return_token_ids": "yes"}, "return_token_ids", "must be true or false"),
        ({"truncate_prompt_tokens": -1}, "truncate_prompt_tokens", "is -1, must be at least 1"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids", "allowed_token_ids = [-1]"),
        ({"bad_words": [5]}, "bad_words", "bad_words = [5]: must be a list, each item text"),
        ({"cache_salt": ""}, "cache_salt", "must be text that is not empty"),
        ({"cache_salt": 5}, "cache_salt", "must be text that is not empty"),
        ({"continue_final_message": 1}, "continue_final_message", "must be true or false"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "add_generation_prompt",
            "must be false with continue_final_message",
        ),
        ({"messages": [{"role": "user", "content": "a", "prefix": True}]}, "messages[0].prefix", "is not supported"),
        ({"prompt": "def"}, "prompt", "is a field of completions"),
        ({"temperature": "hot"}, "temperature", 'temperature = "hot"'),
        ({"temperature": True}, "temperature", "must be a number"),
        ({"ignore_eos": 1.5}, "ignore_eos", "must be true or false"),
        ({"specdec": {"max_candidates": True}}, "specdec.max_candidates", "must be a number"),
        ({"logit_bias": {"5": True}}, "logit_bias", "must be a number"),
        ({"stop_token_ids": [True]}, "stop_token_ids", "must be a number"),
        (
            {"messages": [{"role": "user", "content": "a", "refusal": "no"}]},
            "messages[0].refusal",
            "together with content",
        ),
        ({"n": 0}, "n", "must be at least 1"),
        ({"n": 1.5}, "n", "n = 1.5"),
        ({"max_tokens": -1}, "max_tokens", "max_tokens: is -1, must be at least 1"),
        ({"max_completion_tokens": -2}, "max_completion_tokens", "is -2, must be at least 1"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "is 0, must be at least 1"),
        ({"n": -1}, "n", "is -1, must be at least 1"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "conflicts with max_completion_tokens"),
        ({"repetition_penalty": 1.1, "repeat_penalty": 1.2}, "repetition_penalty", "conflicts with repeat_penalty"),
        ({"seed": 2**64}, "seed", "from -2^63"),
        ({"seed": "5"}, "seed", 'is "5", must be a whole number'),
        ({"cache_salt": [["a"] * 4000]}, "cache_salt", "is a list, must be text that is not empty"),
        ({"chat_template_kwargs": "x" * 4000}, "chat_template_kwargs", f'is "{"x" * 100}...", must be an object'),
        ({"logit_bias": {"x": 1}}, "logit_bias", "'x' is not a token id"),
        ({"logit_bias": [1]}, "logit_bias", "must be an object"),
        (
            {"logit_bias": {str(n): 1 for n in range(4097)}},
            "logit_bias",
            "has 4097 values or more, must have at most 4096",
        ),
        ({"stop": ["a"] * 4097}, "stop", "must have at most 4096"),
        ({"specdec": {"drafters": ["ngram"] * 4097}}, "specdec", "must have at most 4096"),
        ({"metadata": {"a": [[0] * 4000, {"b": [0] * 200}]}}, "metadata", "must have at most 4096"),
        ({"logprobs": 5}, "logprobs", "must be true or false"),
        ({"top_logprobs": 5}, "top_logprobs", "needs logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "set stream"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown parameter"),
        ({"stream": 1}, "stream", "stream: is 1, must be true or false"),
        ({"stop": [1]}, "stop", "stop = "),
        ({"chat_template_kwargs": 5}, "chat_template_kwargs", "must be an object"),
        ({"chat_template_kwargs": {"a": 10**400}}, "chat_template_kwargs", "chat_template_kwargs = "),
        ({"messages": []}, "messages", "is an empty list, must be a list of at least one message"),
        ({"messages": [{"role": "assistant", "refusal": 0}]}, "messages[0].refusal", "must be text"),
        ({"messages": [{"role": "assistant", "reasoning_content": {}}]}, "messages[0].reasoning", "reasoning = {}"),
        ({"tools": [TOOL | {"strict": True}]}, "tools[0].strict", "tools[0].strict = true: not one of type, function"),
        ({"tools": {}}, "tools", "must be a list"),
        ({"tools": [TOOL], "tool_choice": TOOL_F | {"x": 1}}, "tool_choice.x", "x = 1: not one of type, function"),
        ({"messages": "hello"}, "messages", "must be a list"),
        ({"messages": [1]}, "messages[0]", "must be an object"),
        ({"messages": MESSAGES * 4097}, "messages", "has 4097 messages, must have at most 4096"),
        ({"messages": [CALLING] * 2}, "messages", "has 6000 tool_calls, must have at most 4096"),
        ({"tools": [TOOL] * 129}, "tools", "has 129 tools, must have at most 128"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "must be text"),
        ({"messages": [{"role": "function", "content": "4"}]}, "messages[0].role", "to an older API"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}]},
            "messages[0].tool_calls[0].function.arguments",
            "messages[0].tool_calls[0].function.arguments = 5: must be an object",
        ),
        ({"messages": [{"role": "user", "content": "a", "audio": {"id": "b"}}]}, "messages[0].audio", "not supported"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]",
            "models are text-only here",
        ),
        ({"specdec": {"temperature": 1}}, "specdec.temperature", "unknown parameter"),
        ({"specdec": {"speculation": "maybe"}}, "specdec.speculation", "not one of auto"),
        ({"specdec": {"speculation": "off", "drafters": ["ngram"]}}, None, "give either speculation or drafters"),
        ({"model": 5}, "model", "must be text"),
        ({"model": True}, "model", "must be text"),
        ({"model": "\ud800"}, "model", "model = "),
        ({"specdec": 1}, "specdec", "must be an object"),
    ],
)
def test_a_chat_is_refused_by_field(fields: dict[str, Any], param: str | None, problem: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    assert caught.value.status == 400
    assert json.dumps(caught.value.body, ensure_ascii=False).encode()
    assert caught.value.param == param
    assert problem in caught.value.message


@pytest.mark.parametrize(
    ("fields", "param", "problem"),
    [
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "is not available in streams"),
        ({"prompt_logprobs": -1}, "prompt_logprobs", "must be a whole number, at least 0"),
        ({"best_of": 2}, "best_of", "is not supported"),
        ({"repetition_detection": {"min_count": 3}}, "repetition_detection", "is not supported"),
        ({"repeat_last_n": 64, "repeat_penalty": 1.1}, "repeat_last_n", "penalties look at the whole text"),
        ({"repeat_last_n": 64, "presence_penalty": 1}, "repeat_last_n", "penalties look at the whole text"),
        ({"n_cmpl": 2}, "n_cmpl", "is not supported: use n"),
        ({"top_a": 0.1}, "top_a", "is not supported"),
        ({"reasoning_budget_tokens": 0}, "reasoning_budget_tokens", "use chat_template_kwargs"),
        ({"suffix": "x"}, "suffix", "is not supported"),
        ({"echo": 0}, "echo", "must be true or false"),
        ({"messages": MESSAGES}, "messages", "is a field of chats"),
        ({"logprobs": True}, "logprobs", "is true, must be a whole number: false or true is for chats"),
        ({"prompt": []}, "prompt", "is empty, must be text"),
        ({"prompt": [1, "a"]}, "prompt", "must be text"),
        ({"prompt": [[1], [True]]}, "prompt", "must be text"),
        ({"prompt": ["a"] * 65}, "prompt", "at most 64"),
        ({"prompt": ["a"] * 72 + [1]}, "prompt", "must be text"),
        ({"prompt": [-1]}, "prompt", "prompt = [-1]"),
        ({"echo": True, "truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "cannot be combined with echo"),
    ],
)
def test_a_completion_is_refused_by_field(fields: dict[str, Any], param: str, problem: str) -> None:
    with pytest.raises(ApiError) as caught:
        completion(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert problem in caught.value.message


@pytest.mark.parametrize(
    ("own", "field", "param"),
    [
        ({"rule": "contrastive", "speculation": "off"}, "speculation.off", "specdec.speculation"),
        ({"speculation": "draft"}, "speculation.drafters", "specdec.speculation"),
        ({"speculation": "jacobi"}, "speculation.jacobi", "specdec.speculation"),
        ({"jacobi": 500}, "speculation.lookahead", "specdec.jacobi"),
        ({"lookahead": [500, 5, 5]}, "speculation.lookahead", "specdec.lookahead"),
        ({"expansion": [2, 17]}, "speculation.expansion[1]", "specdec.expansion[1]"),
        ({"drafters": ["ngram"], "forced": True}, "speculation.forced", "specdec.forced"),
        ({"max_depth": 99}, "speculation.max_depth", "specdec.max_depth"),
    ],
)
def test_what_an_orchestrator_refuses_has_the_callers_name(own: dict[str, Any], field: str, param: str) -> None:
    refusal = InvalidRequest("no", violations=[(field, "does not go together with it")])
    assert from_specdec(refusal, chat(specdec=own).names).param == param


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b'{"a": NaN}', b"[" * 100_000, b"1" * 10_000])
def test_what_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        fields_of(body)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")
    assert "sys." not in caught.value.message


def test_every_field_that_openai_has_is_known() -> None:
    """The fields are those of OpenAI's client. A field added later is refused by name, and fails this test."""
    known = SAME | RENAMED.keys() | READ | UNSUPPORTED.keys() | WITHOUT_EFFECT
    of_chat = chat_params.CompletionCreateParamsBase.__annotations__.keys()
    of_completions = completion_create_params.CompletionCreateParamsBase.__annotations__.keys()
    assert of_chat - known == set()
    assert of_completions - known == set()
    vllm = {"add_generation_prompt", "chat_template_kwargs", "continue_final_message", "include_reasoning"}
    assert of_chat | vllm >= OF_CHAT
    assert of_completions >= OF_COMPLETIONS


def test_an_answer_that_says_nothing_can_be_sent_back() -> None:
    """Clients that drop fields unknown to OpenAI send such answers: of a model that only reasoned, or that refused."""
    turns = [
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": None, "refusal": "I cannot."},
        {"role": "assistant", "content": "", "refusal": None},
    ]
    message = chat(messages=[*MESSAGES, *turns]).message(0)
    assert [turn.content for turn in message.chat.messages] == ["hello", "", "I cannot.", ""]


@pytest.mark.parametrize("field", ["name", "tool_call_id", "tool_calls", "reasoning"])
@pytest.mark.parametrize("value", [0, False, {}])
def test_what_is_empty_is_not_silence_if_it_is_of_another_type(field: str, value: object) -> None:
    with pytest.raises(ApiError) as caught:
        chat(messages=[{"role": "user", "content": "a", field: value}])
    assert caught.value.param == f"messages[0].{field}"
    assert f"messages[0].{field} = " in caught.value.message


@pytest.mark.parametrize(
    "fields",
    [{"reasoning": "why", "reasoning_content": ""}, {"reasoning": None, "reasoning_content": "why"}],
)
def test_reasoning_has_two_names(fields: dict[str, Any]) -> None:
    message = chat(messages=[{"role": "assistant", "content": "a", "name": "", "tool_calls": [], **fields}]).message(0)
    assert message.chat.messages[0].reasoning == "why"


@pytest.mark.parametrize("depth", [200, 400, 900])
def test_arguments_that_are_nested_too_deeply_are_refused(depth: int) -> None:
    body = b'{"model": "m", "messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"a": %s}}'
    with pytest.raises(ApiError) as error:
        parse_fields(fields_of(body % (b"[" * depth + b"]" * depth)), chat=True)
    assert error.value.status == 400
    assert error.value.param == "chat_template_kwargs"


TAG: dict[str, Any] = {
    "type": "structural_tag",
    "structures": [{"begin": "<", "schema": {"type": "integer"}, "end": ">"}],
    "triggers": ["<"],
}


def test_what_a_text_must_look_like() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    named = {"name": "n", "strict": True, "schema": schema}

    def described(asked: ParsedRequest) -> Any:
        return json.loads(asked.message(0).grammar.json_schema)

    assert described(chat(response_format={"type": "json_schema", "json_schema": named})) == schema
    assert described(chat(response_format={"type": "json_object"})) == {"type": "object"}
    assert described(chat(response_format={"type": "json_object", "schema": None})) == {"type": "object"}
    assert described(chat(response_format={"type": "json_object", "schema": schema})) == schema
    assert described(chat(response_format={"type": "json_object", "value": schema})) == schema
    assert described(chat(response_format={"type": "json", "value": schema})) == schema  # from huggingface_hub
    assert described(chat(structured_outputs={"json": schema, "regex": None})) == schema
    assert completion(structured_outputs={"regex": "a+"}).message(0).grammar.regex == "a+"
    assert completion(structured_outputs={"choice": ["a", "b"]}).message(0).grammar.choice.texts == ["a", "b"]
    assert completion(structured_outputs={"grammar": "start: x"}).message(0).grammar.lark == "start: x"
    ebnf = completion(structured_outputs={"grammar": 'root ::= "a" | "b"', "disable_any_whitespace": True})
    assert ebnf.message(0).grammar.lark == "start: ROOT\nROOT: /(?:a|b)/"
    assert described(chat(structured_outputs={"json_object": True})) == {"type": "object"}
    assert chat(structured_outputs={"json_object": False}).message(0) == chat().message(0)
    guidance = {"whitespace_pattern": " ?", "item_separator": ",", "key_separator": ":"}
    laid_out = chat(structured_outputs={"json": json.dumps(schema), "whitespace_pattern": " ?"})
    assert described(laid_out) == {**schema, "x-guidance": guidance}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"structured_outputs": {"json": {}}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": None, "json_object": True}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"structural_tag": TAG}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "structured_outputs.grammar"),
        ({"response_format": TAG, "structured_outputs": {"disable_any_whitespace": True}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"json_object": False}}, "response_format"),
    ],
)
def test_a_grammar_is_named_by_the_field_that_holds_it(fields: dict[str, Any], field: str) -> None:
    names = chat(**fields).names
    assert {names[name] for name in ("json_schema", "grammar.json_schema", "lark", "grammar.lark")} == {field}


@pytest.mark.parametrize("strict", [{}, {"strict": None}, {"strict": False}])
def test_a_format_that_is_not_strict_may_be_checked_afterwards(strict: dict[str, Any]) -> None:
    told = chat(response_format={"type": "json_schema", "json_schema": {"schema": TAGS, **strict}})
    assert json.loads(told.message(0).grammar.json_schema) == TAGS


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True},
        {"type": "object", "properties": {"uniqueItems": {"type": "string"}}},
        {"const": "uniqueItems", "$dynamicRef": "#x"},  # refused by the orchestrator
    ],
)
def test_a_strict_format_may_name_what_is_enforced(schema: dict[str, Any]) -> None:
    told = chat(response_format={"type": "json_schema", "json_schema": {"schema": schema, "strict": True}})
    assert json.loads(told.message(0).grammar.json_schema) == schema


def test_null_is_silence() -> None:
    assert chat(temperature=None, tools=None, stop=None, n=None) == chat()
    told = {"include_usage": None, "include_obfuscation": False}
    assert chat(stream=True, stream_options=told) == chat(stream=True)


def test_what_asks_for_what_happens_anyway_is_taken() -> None:
    assert completion(best_of=3, n=3).samples == 3
    assert completion(echo=False, suffix="") == completion()
    assert completion(top_k=-1).message(0).sampling.top_k == 0
    assert chat(response_format={"type": "text"}, tools=[], tool_choice="none") == chat()
    assert chat(skip_special_tokens=True, length_penalty=1, cache_prompt=True) == chat()
    assert chat(max_tokens=5, max_completion_tokens=5).message(0).max_tokens == 5
    assert completion(n_predict=5, repeat_penalty=1.5).message(0) == completion(
        max_tokens=5, repetition_penalty=1.5
    ).message(0)
    assert completion(seed=-1) == completion()
    assert completion(repeat_last_n=64, repeat_penalty=1, n_cmpl=1, reasoning_budget_tokens=-1) == completion(
        repeat_penalty=1
    )
    assert completion(repeat_last_n=-1, repeat_penalty=1.5) == completion(repeat_penalty=1.5)
    for unlimited in (completion(n_predict=-1), chat(n_predict=-1)):  # also where generation_config.json has a limit
        assert unlimited.message(0).max_tokens == (1 << 31) - 1


def test_the_schemas_of_tools_that_are_not_offered_are_not_kept() -> None:
    assert chat(tools=[TOOL], tool_choice="auto").schemas
    assert chat(tools=[TOOL], tool_choice="none").schemas == {}


def test_unknown_fields_are_ignored_and_named() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}], "id": "1"}]
    found = chat(temprature=1, messages=messages)
    assert found.ignored == ("temprature", "messages[0].id", "messages[0].content[0].cache_control")
    assert found.message(0) == chat(messages=[{"role": "user", "content": "a"}]).message(0)
    tool = {"type": "function", "function": {"name": "w", "parameters": {"type": "object"}}}
    found = chat(tools=[tool, tool | {"cache_control": {"type": "ephemeral"}, "x": None}])
    assert found.ignored == ("tools[1].cache_control",)
    assert found.message(0) == chat(tools=[tool, tool]).message(0)
    called: Json = {"id": "i", "type": "function", "function": {"name": "w", "arguments": "{}"}}
    asked = {"tools": [tool], "messages": [*MESSAGES, {"role": "assistant", "tool_calls": [called]}]}
    odd_tool = tool | {"function": {**tool["function"], "title": "W", "cache_control": {}}}  # type: ignore[dict-item]
    odd = called | {"function": {**called["function"], "parsed_arguments": {}}, "index": 0, "name": "x", "extra": 1}
    found = chat(tools=[odd_tool], messages=[*MESSAGES, {"role": "assistant", "tool_calls": [odd]}])
    call = f"messages[{len(MESSAGES)}].tool_calls[0]"
    ignored = (f"{call}.function.parsed_arguments", f"{call}.name", f"{call}.extra", "tools[0].function.title")
    assert found.ignored == (*ignored, "tools[0].function.cache_control")
    assert found.message(0) == chat(**asked).message(0)
    assert chat(**{f"field{number}": number for number in range(100)}).ignored[-1] == "field31"
    with pytest.raises(ApiError, match="temprature: unknown parameter"):
        parse_fields({"messages": MESSAGES, "temprature": 1}, chat=True, strict=True)


def test_the_effort_of_reasoning_goes_to_the_template() -> None:
    found = chat(reasoning_effort="low", chat_template_kwargs={"a": "b"}).message(0).chat.template_arguments
    assert dict(found) == {"reasoning_effort": "low", "a": "b"}


@given(st.integers(-(1 << 63), (1 << 63) - 1))
def test_seeds_keep_their_bits(seed: int) -> None:
    """OpenAI's signed seeds map to distinct seeds of ours."""
    ours = completion(seed=seed).message(0).sampling.seed
    assert 0 <= ours < 1 << 64
    assert (ours if ours < 1 << 63 else ours - (1 << 64)) == (seed if seed != -1 else 0)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = sorted(SAME | RENAMED.keys() | READ | UNSUPPORTED.keys() | WITHOUT_EFFECT | {"other"})


@given(st.dictionaries(st.sampled_from(FIELDS), JSON), st.booleans())
def test_any_body_is_understood_or_refused(fields: dict[str, Any], of_chat: bool) -> None:
    """Errors name a field; no other exception is raised."""
    try:
        found: ParsedRequest | ApiError = (chat if of_chat else completion)(**fields)
    except ApiError as error:
        found = error
    if isinstance(found, ApiError):
        assert found.status == 400
        assert found.message
    else:
        assert found.message(0).ByteSize()
