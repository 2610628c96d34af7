"""Every option becomes a field of the request; validation is left to the server."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from specdec.client import AsyncClient, Client, GenerateOptions, build_request
from specdec.v2 import generation_pb2 as pb
from specdec.v2 import model_pb2

EVERY_OPTION: dict[str, Any] = {
    "model": "m",
    "max_tokens": 9,
    "min_tokens": 2,
    "stop": ["a", "b"],
    "stop_tokens": [3],
    "ignore_end_token": True,
    "ignore_generation_config": True,
    "n": 2,
    "logprobs": 0,
    "prompt_logprobs": 0,
    "rejected_candidates": True,
    "temperature": 0.5,
    "top_p": 0.75,
    "fallback_temperature": 0.25,
    "top_k": 4,
    "min_p": 0.25,
    "typical_p": 0.75,
    "repetition_penalty": 1.5,
    "frequency_penalty": -1.0,
    "presence_penalty": 0.5,
    "logit_bias": {7: -2.0},
    "banned_tokens": [8],
    "allowed_tokens": [7, 9],
    "bad_words": ["no"],
    "seed": 2**64 - 1,
    "regex": "a+",
    "grammar_after_token": 12,
    "drafters": ["ngram", "lookahead"],
    "forced": True,
    "rule": "rejection",
    "max_candidates": 5,
    "max_depth": 6,
    "max_branches": 7,
    "max_nodes": 8,
    "min_path_probability": 0.25,
    "scorer": "probability",
    "expansion": [3, 2],
    "lookahead": (5, 4, 3),
    "alpha": 0.25,
    "amateur_temperature": 0.5,
    "typical_epsilon": 0.125,
    "typical_delta": 0.75,
    "tenant": "t",
    "cache_salt": "s",
    "learn": True,
    "priority": -2,
    "generated_tokens": [1, 2],
    "model_fingerprint": "f1",
    "prompt_digest": "d1",
    "include_stop": True,
    "show_special_tokens": True,
    "return_prompt_token_ids": True,
    "truncate_prompt_tokens": 11,
}


OTHER_GRAMMARS = ("json_schema", "lark", "choice")
OF_CHATS = ("add_generation_prompt", "continue_final_message", "tools", "tool_choice", "parallel_tool_calls")
OTHERS = (*OTHER_GRAMMARS, *OF_CHATS, "split_reasoning", "jacobi")


def test_every_option_has_its_place() -> None:
    assert (
        EVERY_OPTION.keys() | {"tokens", "messages", "time", "template_arguments", "speculation", *OTHERS}
        == GenerateOptions.__annotations__.keys()
    )
    assert build_request("hi", **EVERY_OPTION) == pb.GenerateRequest(
        model="m",
        text="hi",
        max_tokens=9,
        fallback_temperature=0.25,
        min_tokens=2,
        stop=["a", "b"],
        stop_tokens=[3],
        ignore_end_token=True,
        ignore_generation_config=True,
        n=2,
        logprobs=0,
        prompt_logprobs=0,
        rejected_candidates=True,
        sampling=pb.SamplingParameters(
            temperature=0.5,
            top_p=0.75,
            top_k=4,
            min_p=0.25,
            typical_p=0.75,
            repetition_penalty=1.5,
            frequency_penalty=-1.0,
            presence_penalty=0.5,
            logit_bias={7: -2.0},
            banned_tokens=[8],
            allowed_tokens=[7, 9],
            bad_words=["no"],
            seed=2**64 - 1,
        ),
        speculation=pb.Speculation(
            drafters=[model_pb2.DRAFTER_NGRAM, model_pb2.DRAFTER_LOOKAHEAD],
            forced=True,
            max_candidates=5,
            max_depth=6,
            max_branches=7,
            max_nodes=8,
            min_path_probability=0.25,
            scorer=model_pb2.DRAFT_SCORER_PROBABILITY,
            expansion=[3, 2],
            lookahead=model_pb2.Lookahead(window=5, ngram=4, guesses=3),
        ),
        grammar=model_pb2.Grammar(regex="a+", after_token=12),
        rule=model_pb2.ACCEPTANCE_RULE_REJECTION,
        contrast=model_pb2.Contrast(alpha=0.25, amateur_temperature=0.5),
        typicality=model_pb2.Typicality(typical_epsilon=0.125, typical_delta=0.75),
        generated_tokens=[1, 2],
        tenant="t",
        cache_salt="s",
        learn=True,
        priority=-2,
        model_fingerprint="f1",
        prompt_digest="d1",
        include_stop=True,
        show_special_tokens=True,
        return_prompt_token_ids=True,
        truncate_prompt_tokens=11,
    )


def test_a_prompt_may_end_with_the_last_message() -> None:
    hi: Any = [{"role": "user", "content": "hi"}]
    assert build_request(messages=hi, continue_final_message=True).chat.continue_final_message
    assert build_request(messages=hi, add_generation_prompt=False).chat.no_generation_prompt
    assert build_request(messages=hi, add_generation_prompt=True) == build_request(messages=hi)
    with pytest.raises(ValueError, match="continue_final_message is given, but no messages"):
        build_request("hi", continue_final_message=True)
    with pytest.raises(TypeError, match="add_generation_prompt = 1: must be true or false"):
        build_request(messages=hi, add_generation_prompt=1)  # type: ignore[arg-type]


def test_every_field_has_its_option() -> None:
    fields = {
        field.name
        for message in (
            pb.GenerateRequest,
            pb.SamplingParameters,
            pb.Speculation,
            model_pb2.Contrast,
            model_pb2.Typicality,
        )
        for field in message.DESCRIPTOR.fields
    }
    without_option = {
        "sampling",
        "contrast",
        "typicality",
        "grammar",
        "json_schema",
        "speculation",
        "off",
        "jacobi",
        "reasoning",
    }  # containers of options, a short form, and fields set through `speculation` and `split_reasoning`
    renamed = {"text": "prompt", "chat": "messages"}
    of_grammars = {"regex", "grammar_after_token"}
    wanted = EVERY_OPTION.keys() - of_grammars | {"prompt", "tokens", "messages"}
    assert {renamed.get(name, name) for name in fields - without_option} == wanted
    kinds = {field.name for field in model_pb2.Grammar.DESCRIPTOR.fields}
    assert kinds - {"opening_token"} == {"after_token", "regex", *OTHER_GRAMMARS}


def test_grammars() -> None:
    schema = {"type": "object", "x": [1, True, None]}
    assert json.loads(build_request(json_schema=schema).grammar.json_schema) == schema
    assert build_request(json_schema="{").grammar.json_schema == "{"  # the server refuses it
    assert build_request(choice=["a", "b"]).grammar.choice.texts == ["a", "b"]
    assert build_request(choice=[]).grammar.WhichOneof("kind") == "choice"
    assert build_request(lark="start: x").grammar == model_pb2.Grammar(lark="start: x")
    assert not build_request("hi").HasField("grammar")


WHOLE = "a whole number from 0 to 4294967295"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"max_tokens": 1.5}, f"max_tokens = 1.5: must be {WHOLE}"),
        ({"max_tokens": 2**32}, f"max_tokens = 4294967296: must be {WHOLE}"),
        ({"max_tokens": -1}, f"max_tokens = -1: must be {WHOLE}"),
        ({"temperature": "hot"}, 'temperature = "hot": must be a number'),
        ({"tenant": "caf\udce9"}, 'tenant = "caf\\udce9": is not valid UTF-8: character 4 cannot be encoded'),
        ({"stop_tokens": 5}, f"stop_tokens = 5: must be a list, each item {WHOLE}"),
        ({"stop_tokens": ["a"]}, f'stop_tokens = ["a"]: must be a list, each item {WHOLE}'),
        ({"bad_words": "no"}, 'bad_words = "no": must be a list, each item text (str)'),
        ({"stop_tokens": b"ab"}, "stop_tokens = b'ab': must be a list, each item a whole number"),
        ({"allowed_tokens": []}, "allowed_tokens = []: allows no token"),
        ({"bad_words": [5]}, "bad_words = [5]: must be a list, each item text (str)"),
        ({"logit_bias": {1: "a"}}, f"must be a mapping, each key {WHOLE}, each value a number"),
    ],
)
def test_an_error_tells_what_an_option_takes(options: dict[str, Any], problem: str) -> None:
    with pytest.raises((ValueError, TypeError), match=re.escape(problem)):
        build_request("hi", **options)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"regex": "a", "lark": "b"}, "one grammar, not several: regex, lark"),
        ({"grammar_after_token": 5}, "but none of json_schema, regex, lark, choice"),
        ({"json_schema": {"a": {1}}}, "json_schema = "),
        ({"json_schema": {"a": float("nan")}}, "json_schema = "),
        ({"json_schema": 5}, "json_schema = 5: must be text"),
        ({"choice": "ab"}, 'choice = "ab": must be a list'),
        ({"choice": [1]}, "choice = "),
        ({"regex": 5}, "regex = 5: must be text"),
    ],
)
def test_what_is_no_grammar(options: dict[str, Any], problem: str) -> None:
    with pytest.raises((ValueError, TypeError), match=problem):
        build_request("hi", **options)


def test_prompts() -> None:
    assert build_request(tokens=[1, 2]).tokens.ids == [1, 2]
    chat = build_request(messages=[{"role": "user", "content": "hi"}]).chat
    assert chat == pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="hi")])
    # Empty prompts are sent unchanged; the server refuses them.
    assert build_request("").WhichOneof("prompt") == "text"
    assert build_request(tokens=[]).WhichOneof("prompt") == "tokens"
    assert build_request(messages=[]).WhichOneof("prompt") == "chat"
    assert build_request().WhichOneof("prompt") is None
    with pytest.raises(ValueError, match="not several: prompt, tokens"):
        build_request("hi", tokens=[1])


def test_the_time_of_a_conversation() -> None:
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    time = datetime(2024, 2, 29, 12, tzinfo=UTC)
    assert build_request(messages=messages, time=time).chat.time.ToDatetime(UTC) == time
    with pytest.raises(ValueError, match=r"^time = .* time zone$"):
        build_request(messages=messages, time=datetime(2024, 2, 29))
    for time in (
        datetime.min.replace(tzinfo=timezone(timedelta(hours=1))),
        datetime.fromisoformat("9999-12-31T23:00-02:00"),
    ):
        with pytest.raises(ValueError, match=r"^time = .* in UTC$"):
            build_request(messages=messages, time=time)
    with pytest.raises(ValueError, match="no messages"):
        build_request("hi", time=time)


def test_arguments_of_a_template() -> None:
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    told = {"enable_thinking": False, "depth": 2, "names": ["a", None]}
    assert dict(build_request(messages=messages, template_arguments=told).chat.template_arguments.items()) == told
    deep: dict[str, Any] = {}
    for _ in range(300):
        deep = {"in": deep}
    for wrong in ({"a": object()}, {"a": 10**400}, deep, 5, {1: 2}):
        with pytest.raises((ValueError, TypeError), match=r"^template_arguments = "):
            build_request(messages=messages, template_arguments=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no messages"):
        build_request("hi", template_arguments=told)


def test_none_and_absent_are_the_same_and_zero_is_not() -> None:
    nothing: dict[str, Any] = dict.fromkeys(EVERY_OPTION)
    assert build_request("hi", **nothing) == build_request("hi") == pb.GenerateRequest(text="hi")
    assert build_request("hi", seed=0).sampling.HasField("seed")
    assert build_request("hi", max_tokens=0).HasField("max_tokens")


def test_one_stop_string_is_not_its_letters() -> None:
    assert list(build_request("hi", stop="end").stop) == ["end"]


@pytest.mark.parametrize(
    ("option", "value", "error"),
    [
        ("max_tokens", -1, ValueError),
        ("max_tokens", 2**32, ValueError),
        ("max_tokens", 10**300, ValueError),
        ("max_tokens", "many", TypeError),
        ("temperature", 10**400, ValueError),
        ("priority", -(2**70), ValueError),
        ("seed", 2**64, ValueError),
        ("stop_tokens", [-1], ValueError),
        ("stop", ["\ud800"], ValueError),
        ("logit_bias", {-1: 1.0}, ValueError),
        ("tokens", [2**32], ValueError),
        ("stop", 5, TypeError),
        ("stop", ["a", 5], TypeError),
        ("stop", {"a": 1}, TypeError),
        ("bad_words", {"a": 1}, TypeError),
        ("stop_tokens", {"7": 1}, TypeError),
        ("tokens", {"7": 1}, TypeError),
        ("drafters", {"ngram": 1}, ValueError),
        ("tenant", 5, TypeError),
        ("n", 0, ValueError),
        ("n", -1, ValueError),
        ("messages", "hi", TypeError),
        ("messages", {"role": "user", "content": "hi"}, TypeError),
        ("messages", 5, TypeError),
        ("speculation", "on", ValueError),
        ("jacobi", -1, ValueError),
        ("scorer", "best", ValueError),
        ("expansion", [-1], ValueError),
        ("max_nodes", True, TypeError),
        ("jacobi", True, TypeError),
        ("jacobi", "8", TypeError),
        ("rule", "exact", ValueError),
    ],
)
def test_what_does_not_fit_is_named(option: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"^{option} = ") as caught:
        build_request(**{option: value})
    assert json.dumps(value)[:100] in str(caught.value)


def test_no_samples_are_refused_with_the_limit() -> None:
    with pytest.raises(ValueError, match=r"^n = 0: must be at least 1$"):
        build_request("hi", n=0)


TURN = 'must be a mapping with "role" and "content", and perhaps "reasoning", "tool_calls", "tool_call_id", "name"'
FINE = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("messages", "error", "said"),
    [
        ("hi", TypeError, f'messages = "hi": {TURN.replace("be", "be a list, each item", 1)}'),
        ([FINE, "hi"], TypeError, f'messages[1] = "hi": {TURN}'),
        ([FINE, {"role": "user"}], ValueError, f'messages[1] = {{"role": "user"}}: {TURN}'),
        ([{**FINE, "nam": "x"}], ValueError, f"messages[0] = {json.dumps({**FINE, 'nam': 'x'})}: {TURN}"),
        ([{**FINE, "content": 5}], TypeError, "messages[0].content = 5: must be text (str)"),
        ([{**FINE, "content": None}], TypeError, "messages[0].content = null: must be text (str)"),
        ([{**FINE, "role": [1]}], TypeError, "messages[0].role = [1]: must be text (str)"),
    ],
)
def test_what_is_no_conversation_is_told_in_our_words(messages: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error) as caught:
        build_request(messages=messages)
    assert str(caught.value) == said


def test_who_may_propose_goes_by_one_name() -> None:
    unknown: Any = "on"
    own = [number for number in model_pb2.Drafter.values() if number not in (0, model_pb2.DRAFTER_REMOTE)]
    assert build_request("hi", speculation="local").speculation == pb.Speculation(drafters=own)
    with pytest.raises(ValueError, match=r'^speculation = "on": not one of auto, off, always, draft, local, ngram, '):
        build_request("hi", speculation=unknown)


def test_a_jacobi_window_is_a_lookahead_window_of_bigrams() -> None:
    asked = build_request("hi", speculation="jacobi", jacobi=8).speculation
    size = model_pb2.Lookahead(window=8, ngram=2, guesses=1)
    assert asked == pb.Speculation(drafters=[model_pb2.DRAFTER_LOOKAHEAD], jacobi=True, lookahead=size)
    with pytest.raises(ValueError, match="give either lookahead or jacobi"):
        build_request("hi", lookahead=(5, 3, 5), jacobi=8)


def test_misspelt_options_are_refused() -> None:
    misspelt: dict[str, Any] = {"max_token": 3}
    with pytest.raises(TypeError, match="unknown option: max_token"):
        build_request("hi", **misspelt)


def test_clients_connect_when_first_used() -> None:
    Client("nowhere.invalid:1").close()
    client = AsyncClient("nowhere.invalid:1")  # constructed outside an event loop
    with pytest.raises(RuntimeError, match="no running event loop"):
        client.generate("hi")


WEATHER = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": {"b": 1, "a": 2}}}


def test_tools() -> None:
    """Schemas keep their key order, since templates show it."""
    said: list[Any] = [{"role": "user", "content": "hi"}]
    chat = build_request(messages=said, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False).chat
    (tool,) = chat.tools
    assert (tool.name, tool.description, tool.parameters) == ("weather", "d", '{"b": 1, "a": 2}')
    assert (chat.tool_required, chat.tool_name, chat.single_tool_call) == (True, "", True)
    named = build_request(messages=said, tools=[WEATHER], tool_choice={"type": "function", "function": {"name": "f"}})
    assert named.chat.tool_name == "f"
    assert not build_request(messages=said, tools=[WEATHER], tool_choice="none").chat.tools
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}
    turns: list[Any] = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "4", "tool_call_id": "c1"},
    ]
    asked, answered = build_request(messages=turns).chat.messages
    assert asked.tool_calls == [pb.ToolCall(id="c1", name="weather", arguments='{"city": "Bonn"}')]
    assert answered.tool_call_id == "c1"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"tools": [WEATHER]}, "tools is given, but no messages"),
        ({"messages": [FINE], "tool_choice": "auto"}, "tool_choice is given, but no tools"),
        ({"messages": [FINE], "tools": WEATHER}, "must be a list of functions"),
        ({"messages": [FINE], "tools": [WEATHER], "tool_choice": "maybe"}, 'tool_choice = "maybe": not one of auto'),
        ({"messages": [FINE], "tools": [WEATHER], "parallel_tool_calls": 0}, "must be true or false"),
        ({"messages": [FINE], "tools": [{"type": "custom"}]}, 'must have the type "function"'),
        ({"messages": [FINE], "tools": [{"function": {"name": 5}}]}, "must have a name"),
        ({"messages": [FINE], "tools": [{"function": {"name": "f", "x": 1}}]}, "function.x = 1: not one of name"),
        ({"messages": [FINE], "tools": [{"function": {"name": "f", "parameters": 5}}]}, "must be an object"),
        ({"messages": [{**FINE, "tool_calls": "x"}]}, "must be a list of calls"),
        ({"messages": [{**FINE, "tool_calls": [{"function": {}}]}]}, "must have a name"),
        (
            {"messages": [{**FINE, "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}]},
            "messages[0].tool_calls[0].function.arguments = [1]: must be an object",
        ),
    ],
)
def test_what_is_no_tool(options: dict[str, Any], problem: str) -> None:
    with pytest.raises((ValueError, TypeError), match=re.escape(problem)):
        build_request(**options)
