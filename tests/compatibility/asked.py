"""The requests without schemas: every field of completions and chats of OpenAI, vLLM and llama.cpp, each added alone to
a small request; options that belong together; forms of messages and tools; and routes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"

Body = dict[str, Any]

SMALL: Mapping[str, Body] = {
    COMPLETIONS: {"prompt": "import os", "max_tokens": 4, "temperature": 0},
    CHATS: {"messages": [{"role": "user", "content": "Read a file."}], "max_tokens": 4, "temperature": 0},
}
"""The small request for each route, to which fields are added."""


@dataclass(frozen=True)
class Asked:
    """A request. When it is sent, `model` is added to its body, unless the body has one."""

    group: str
    name: str  # unique within its group; shown in the page
    method: str
    path: str
    body: Body | None = None
    schema: Body | None = None  # of the answer, or of the arguments of its call


ANSWER = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"], "additionalProperties": False}
NAMED = {"name": "n", "schema": ANSWER}
TOOL = {
    "type": "function",
    "function": {
        "name": "w",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]},
    },
}

DATED = {"type": "object", "properties": {"d": {"type": "string", "format": "date-time"}}}

FIELDS: Mapping[str, list[Any]] = {
    # OpenAI's
    "best_of": [1],
    "echo": [False],
    "extra_body": [{"a": 1}],
    "frequency_penalty": [0.5],
    "logit_bias": [{"5": 1}],
    "logprobs": [True],
    "max_completion_tokens": [4],
    "max_tokens": [0, -1, 100_000, None],
    "metadata": [{"a": "b"}],
    "model": ["no-such-model", ""],
    "n": [2],
    "presence_penalty": [0.5],
    "prompt_cache_key": ["k"],
    "response_format": [
        {"type": "text"},
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": NAMED},
        {"type": "json_object", "schema": ANSWER},
        {"type": "json_schema", "schema": ANSWER},
        {"type": "structural_tag", "structures": [], "triggers": []},
        {"type": "grammar", "grammar": 'root ::= "a"'},
    ],
    "safety_identifier": ["s"],
    "seed": [1, -1],
    "service_tier": ["auto", "flex"],
    "stop": ["zz", ["a", "b", "c", "d", "e"]],
    "store": [False, True],
    "stream": [True],
    "stream_options": [{"include_usage": True}],
    "suffix": [""],
    "temperature": [0, 0.3, 2.5],
    "top_p": [0.9, 0],
    "user": ["u"],
    # vLLM's
    "add_special_tokens": [True, False],
    "allowed_token_ids": [[5, 6]],
    "bad_words": [["foo"], []],
    "cache_salt": ["salt"],
    "ec_transfer_params": [{"a": 1}],
    "guided_choice": [["a", "b"]],
    "guided_decoding_backend": ["auto"],
    "guided_grammar": ['root ::= "a"'],
    "guided_json": [ANSWER],
    "guided_regex": ["[ab]"],
    "guided_whitespace_pattern": [" ?"],
    "ignore_eos": [True],
    "include_stop_str_in_output": [False, True],
    "kv_transfer_params": [{"a": 1}],
    "length_penalty": [1.0, 1.2],
    "logprob_token_ids": [[5]],
    "min_p": [0.1, 1.0],
    "min_tokens": [1],
    "mm_payload": [None],
    "priority": [0, 3],
    "prompt_logprobs": [1, None],
    "repetition_detection": [{"max_pattern_size": 5, "min_count": 3}],
    "repetition_penalty": [1.1],
    "request_id": ["abc"],
    "return_mm_kwargs": [True],
    "return_token_ids": [True, False],
    "return_token_offsets": [False],
    "return_tokens_as_token_ids": [True, False],
    "routed_experts_prompt_start": [0],
    "session_id": ["s"],
    "skip_special_tokens": [True, False],
    "spaces_between_special_tokens": [True, False],
    "stop_token_ids": [[7]],
    "stream_interval": [2],
    "structured_outputs": [
        {"json": ANSWER, "whitespace_pattern": " ?"},
        {"json": '{"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"]}'},
        {"regex": "[ab]{2}"},
        {"choice": ["a", "b"]},
        {"grammar": 'start: "a" | "b"'},
        {"grammar": 'root ::= "a" | "b"'},
        {"json_object": True},
        {"structural_tag": "{}"},
    ],
    "thinking_token_budget": [10],
    "top_k": [5, -1, 0],
    "truncate_prompt_tokens": [100],
    "truncation_side": ["left"],
    "use_beam_search": [False, True],
    "vllm_xargs": [{"a": 1}],
    "watermarking": [False],
    # llama.cpp's
    "adaptive_decay": [0.9],
    "adaptive_target": [0.5],
    "backend_sampling": [False],
    "cache_prompt": [True],
    "dry_allowed_length": [2],
    "dry_base": [1.75],
    "dry_multiplier": [0.5],
    "dry_penalty_last_n": [64],
    "dry_sequence_breakers": [["\n"]],
    "dynatemp_exponent": [1.0],
    "dynatemp_range": [0.1],
    "grammar": ['root ::= "a"'],
    "grammar_lazy": [False],
    "id_slot": [-1],
    "json_schema": [ANSWER],
    "lora": [[]],
    "min_keep": [1],
    "mirostat": [0, 2],
    "mirostat_eta": [0.1],
    "mirostat_tau": [5.0],
    "n_cache_reuse": [0],
    "n_cmpl": [1],
    "n_discard": [0],
    "n_indent": [0],
    "n_keep": [0],
    "n_predict": [4],
    "n_probs": [2],
    "post_sampling_probs": [True],
    "repeat_last_n": [64],
    "repeat_penalty": [1.1],
    "response_fields": [["content"]],
    "return_progress": [True],
    "return_tokens": [True],
    "samplers": [["top_k", "temperature"]],
    "sse_ping_interval": [5],
    "t_max_predict_ms": [10_000],
    "timings_per_token": [True],
    "top_n_sigma": [1.0],
    "typical_p": [0.9, 1.0],
    "verbose": [False],
    "xtc_probability": [0.1],
    "xtc_threshold": [0.1],
    # unknown to all servers
    "totally_unknown_field": [1],
}
"""Values of the fields that both completions and chats are tried with."""

OF_COMPLETIONS: Mapping[str, list[Any]] = {
    "best_of": [3],
    "echo": [True],
    "logprobs": [0, 1, 5, 20, 50],
    "n": [20],
    "prompt": ["", ["a", "b"], [1, 2], [[1, 2], [3]], ["a", [1, 2]], None, ["a"] * 70],
    "prompt_embeds": [None],
    "stop": [[""], [], ["x"] * 20],
    "suffix": ["x", None],
}

OF_CHATS: Mapping[str, list[Any]] = {
    "add_generation_prompt": [True, False],
    "audio": [{"voice": "a", "format": "wav"}],
    "betas": [[]],
    "cache_control": [{"type": "ephemeral"}],
    "chat_template": ["{{messages[0].content}}"],
    "chat_template_kwargs": [{"enable_thinking": False}],
    "continue_final_message": [False],
    "documents": [[{"title": "t", "text": "x"}]],
    "enable_thinking": [False],
    "function_call": ["auto"],
    "functions": [[TOOL["function"]]],
    "include_reasoning": [True],
    "keep_alive": ["5m"],
    "logprobs": [False],
    "media_io_kwargs": [{}],
    "mm_processor_kwargs": [{}],
    "modalities": [["text"], ["text", "audio"]],
    "moderation": [{}],
    "options": [{"num_ctx": 4096}],
    "parallel_tool_calls": [False],
    "parse_tool_calls": [True],
    "prediction": [{"type": "content", "content": "x"}],
    "prompt": ["x"],
    "provider": [{"order": ["a"]}],
    "reasoning": [{"effort": "low"}, {"enabled": False}],
    "reasoning_budget_tokens": [0],
    "reasoning_control": [False],
    "reasoning_effort": ["none", "low", "high"],
    "reasoning_format": ["none"],
    "return_prompt_text": [True],
    "think": [False],
    "thinking": [{"type": "disabled"}],
    "thinking_budget_tokens": [0],
    "timeout": [5],
    "tool_choice": ["none", "auto", "required"],
    "tools": [[]],
    "top_a": [0.1],
    "top_logprobs": [2],
    "transforms": [[]],
    "verbosity": ["low"],
    "web_search_options": [{}],
}


def _tool(**function: Any) -> Body:
    return {"type": "function", "function": function}


def _called(arguments: Any, content: Any = "") -> list[Body]:
    """Return a conversation with a tool call and the tool's answer."""
    call = {"id": "c1", "type": "function", "function": {"name": "w", "arguments": arguments}}
    return [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "x"},
    ]


def _answered(**message: Any) -> list[Body]:
    """Return a conversation in which the model's answer has these fields."""
    return [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", **message},
        {"role": "user", "content": "c"},
    ]


def _user(content: Any, **more: Any) -> list[Body]:
    return [{"role": "user", "content": content, **more}]


STREAMED: Mapping[str, Body] = {
    "usage": {"stream_options": {"include_usage": True}},
    "usage in every event": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "no obfuscation": {"stream_options": {"include_usage": True, "include_obfuscation": False}},
    "obfuscation": {"stream_options": {"include_obfuscation": True}},
    "progress": {"return_progress": True},
    "no options": {"stream_options": {}},
}
"""Options of streams, for both routes."""

TOGETHER: Mapping[str, Body] = {
    "both limits of tokens": {"max_tokens": 4, "max_completion_tokens": 4},
    "two limits that differ": {"max_tokens": 4, "max_completion_tokens": 5},
    "logprobs, top 20": {"logprobs": True, "top_logprobs": 20},
    "logprobs, top 25": {"logprobs": True, "top_logprobs": 25},
    "options of a stream without one": {"stream": False, "stream_options": {"include_usage": True}},
    "tools": {"tools": [TOOL]},
    "tools, auto": {"tools": [TOOL], "tool_choice": "auto"},
    "tools, required": {"tools": [TOOL], "tool_choice": "required", "max_tokens": 40},
    "tools, one named": {"tools": [TOOL], "tool_choice": _tool(name="w"), "max_tokens": 40},
    "tools, one named as in responses": {"tools": [TOOL], "tool_choice": {"type": "function", "name": "w"}},
    "tools, any": {"tools": [TOOL], "tool_choice": "any"},
    "tools, some allowed": {
        "tools": [TOOL],
        "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [_tool(name="w")]}},
    },
    "tools beside JSON": {"tools": [TOOL], "response_format": {"type": "json_object"}},
    "tools beside a schema": {"tools": [TOOL], "response_format": {"type": "json_schema", "json_schema": NAMED}},
    "no tool, JSON": {"tools": [TOOL], "tool_choice": "none", "response_format": {"type": "json_object"}},
    "tools, logprobs": {"tools": [TOOL], "logprobs": True, "top_logprobs": 2},
    "tools, logprobs, streamed": {"tools": [TOOL], "logprobs": True, "stream": True},
    "a custom tool": {"tools": [{"type": "custom", "custom": {"name": "x"}}]},
    "a tool with a dot in its name": {"tools": [_tool(name="a.b")]},
    "a tool with a name of 75 characters": {"tools": [_tool(name="n" * 75)]},
    "a tool without parameters": {"tools": [_tool(name="w", parameters={})]},
    "a tool with a format": {"tools": [_tool(name="w", parameters=DATED)]},
    "a tool as in responses": {"tools": [{"type": "function", "name": "w", "parameters": {}}]},
    "a tool with cache_control": {"tools": [TOOL | {"cache_control": {"type": "ephemeral"}}]},
    "the last message is the assistant's": {"messages": _answered()[:2]},
    "the last message continued": {
        "messages": _answered()[:2],
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
    "the last message as prefix": {"messages": _answered(prefix=True)[:2]},
    "a developer": {"messages": [{"role": "developer", "content": "a"}, *_user("b")]},
    "parts of text": {"messages": _user([{"type": "text", "text": "a"}])},
    "a part with cache_control": {
        "messages": _user([{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}])
    },
    "a name": {"messages": _user("a", name="bob")},
    "an image": {
        "messages": _user([{"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}])
    },
    "a part as in responses": {"messages": _user([{"type": "input_text", "text": "a"}])},
    "a file": {"messages": _user([{"type": "file", "file": {"file_data": "x"}}])},
    "only the system": {"messages": [{"role": "system", "content": "a"}]},
    "the system in between": {"messages": [*_user("a"), {"role": "system", "content": "b"}, *_user("c")]},
    "two users in a row": {"messages": [*_user("a"), *_user("b")]},
    "the assistant first": {"messages": [{"role": "assistant", "content": "a"}, *_user("b")]},
    "content null": {"messages": _user(None)},
    "content empty": {"messages": _user("")},
    "no messages": {"messages": []},
    "a function's answer": {"messages": [{"role": "function", "name": "w", "content": "x"}]},
    "a call": {"messages": _called('{"city": "Rome"}', None), "tools": [TOOL]},
    "a call without an argument": {"messages": _called(""), "tools": [TOOL]},
    "a call whose arguments are an object": {"messages": _called({"city": "Rome"}), "tools": [TOOL]},
    "a call that was cut off": {"messages": _called('{"city": "Ro'), "tools": [TOOL]},
    "a call as of old": {"messages": _answered(function_call={"name": "w", "arguments": "{}"})},
    "an answer as OpenAI returns it": {
        "messages": _answered(refusal=None, annotations=[], audio=None, function_call=None, tool_calls=None)
    },
    "an answer with reasoning_content": {"messages": _answered(reasoning_content="r")},
    "an answer with reasoning_details": {
        "messages": _answered(reasoning="r", reasoning_details=[{"type": "reasoning.text", "text": "r"}])
    },
    "a message with an id": {"messages": _user("a", id="msg_1")},
    "a message of Ollama": {"messages": _user("a", timestamp=1, images=[])},
}
"""For chats: options that belong together, and forms of messages and tools."""

COMPLETED: Mapping[str, Body] = {
    "echo alone": {"echo": True, "max_tokens": 0, "logprobs": 1},
    "echo with logprobs": {"echo": True, "logprobs": 1},
    "the best of two": {"n": 2, "best_of": 2},
    "options of a stream without one": {"stream": False, "stream_options": {"include_usage": True}},
}
"""For completions: options that belong together."""

ROUTES: tuple[tuple[str, str, Body | None], ...] = (
    ("GET", "/", None),
    ("GET", "/health", None),
    ("GET", "/ping", None),
    ("GET", "/load", None),
    ("GET", "/version", None),
    ("GET", "/metrics", None),
    ("GET", "/props", None),
    ("GET", "/slots", None),
    ("GET", "/docs", None),
    ("GET", "/openapi.json", None),
    ("GET", "/tokenizer_info", None),
    ("GET", "/v1/models", None),
    ("POST", "/tokenize", {"prompt": "import os", "content": "import os"}),
    ("POST", "/detokenize", {"tokens": [5, 6]}),
    ("POST", "/apply-template", {"messages": _user("a")}),
    ("POST", "/v1/responses", {"input": "Read a file.", "max_output_tokens": 16}),
    ("POST", "/v1/messages", {"messages": _user("Read a file."), "max_tokens": 4}),
    ("POST", "/v1/messages/count_tokens", {"messages": _user("Read a file.")}),
    ("POST", "/completions", SMALL[COMPLETIONS]),
    ("POST", "/chat/completions", SMALL[CHATS]),
    ("POST", "/v1/embeddings", {"input": "a"}),
    ("POST", "/v1/rerank", {"query": "a", "documents": ["b"]}),
    ("POST", "/infill", {"input_prefix": "a", "input_suffix": "b", "n_predict": 4}),
)


def requests() -> Iterator[Asked]:
    """Yield all requests without schemas."""
    for values, routes in ((FIELDS, (COMPLETIONS, CHATS)), (OF_COMPLETIONS, (COMPLETIONS,)), (OF_CHATS, (CHATS,))):
        for field, tried in values.items():
            for value in tried:
                for route in routes:
                    yield Asked("fields", _shown(field, value), "POST", route, SMALL[route] | {field: value})
    for name, options in STREAMED.items():
        for route in (COMPLETIONS, CHATS):
            yield Asked("together", f"stream: {name}", "POST", route, SMALL[route] | {"stream": True} | options)
    for name, options in COMPLETED.items():
        yield Asked("together", name, "POST", COMPLETIONS, SMALL[COMPLETIONS] | options)
    for name, options in TOGETHER.items():
        yield Asked("together", name, "POST", CHATS, SMALL[CHATS] | options)
    for method, path, body in ROUTES:
        yield Asked("routes", f"{method} {path}", method, path, body)


MAX_SHOWN = 70


def _shown(field: str, value: Any) -> str:
    """Return a field and its value for the page, with a long value cut."""
    said = json.dumps(value)
    return f"{field} = {said if len(said) <= MAX_SHOWN else said[:MAX_SHOWN] + '...'}"
