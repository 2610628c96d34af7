"""Requests of the Messages API, translated into chat fields and parsed as a chat.

As for chats, unknown fields are ignored and named in the answer; unsupported ones are refused
(`specdec/openai_api/fields.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdec.openai_api.conversation import append_text
from specdec.openai_api.errors import ApiError, refused, renamed, unsupported, wrong
from specdec.openai_api.fields import CHAT_FIELDS, SAMPLING, Unsupported, alike, check_names, encodable, listed, unread
from specdec.openai_api.json_text import Json
from specdec.openai_api.requests import ParsedRequest, parse_fields
from specdec.v2.generation_pb2 import TokenizeRequest

SAME = SAMPLING | frozenset(
    {"cache_salt", "chat_template_kwargs", "max_tokens", "model", "priority", "seed", "specdec", "stream", "top_k"}
)
"""Fields with the same name and meaning as in chats."""

READ = frozenset({"messages", "output_config", "stop_sequences", "system", "thinking", "tool_choice", "tools"})
"""Fields read below."""

OWN_WITHOUT_EFFECT = frozenset({"cache_control", "metadata", "user_profile_id", "workspace_id"})
"""Fields about Anthropic's own accounts and caches."""

OWN_UNSUPPORTED: Mapping[str, Unsupported] = {
    "container": Unsupported(),
    "diagnostics": Unsupported(),
    "inference_geo": Unsupported(),
    "mcp_servers": Unsupported(([],)),
    "service_tier": Unsupported(("auto", "standard_only")),
    "speed": Unsupported(("standard",)),
}
"""Unsupported fields, in addition to those of chats."""

OF_A_TOOL = ("allowed_callers", "defer_loading", "eager_input_streaming", "input_examples")
"""Fields of a tool that are ignored, and listed in the answer."""

NAMES = {
    "stop": "stop_sequences",
    "json_schema": "output_config.format",
    "response_format": "output_config.format",
    "response_format.json_schema": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}
"""Chat field names, mapped to names in this API."""

HINTS = dict.fromkeys(CHAT_FIELDS, "is a field of OpenAI's chats") | {
    name: f"is {NAMES[name]} here" for name in NAMES.keys() & CHAT_FIELDS
}
"""Chat fields with another name here, or without a counterpart."""

THINKING = ("enabled", "adaptive", "between_tools", "disabled")
"""Thinking modes. The chat template decides when a model thinks; "disabled" only omits the reasoning."""

SCHEMAS = ("function.parameters", "parameters")
"""Names of a tool's schema in errors about a chat."""

CHOICES = {"auto": "auto", "any": "required", "none": "none"}


@dataclass(frozen=True)
class MessagesRequest:
    """A parsed request."""

    chat: ParsedRequest
    ignored: tuple[str, ...]  # names of fields without effect, for the answer


def parse_messages(fields: Mapping[str, Any], *, strict: bool = False, counts: bool = False) -> MessagesRequest:
    """Parse the fields of a body; ApiError if they are invalid or unsupported. With `strict`, unknown fields are
    refused; with `counts`, the request only counts tokens."""
    given = {name: value for name, value in fields.items() if value is not None}
    ignored = check_names(given, SAME | READ, hints=HINTS, without_effect=OWN_WITHOUT_EFFECT, others=OWN_UNSUPPORTED)
    if "max_tokens" not in given and not counts:
        raise refused("max_tokens", "is missing")
    if alike(given.get("max_tokens"), 0):  # valid only with prompt_logprobs
        raise wrong("max_tokens", 0, "at least 1")
    messages, places = _chat_messages(given, ignored)
    chat = {name: value for name, value in given.items() if name in SAME}
    if (last := messages[-1])["role"] == "assistant" and not last.get("tool_calls"):
        chat["continue_final_message"] = True  # prefill
    elif last["role"] == "assistant" and not counts:
        raise refused(places[-1], "ends with calls, which must be followed by their results")
    chat |= {"messages": messages, "stop": given.get("stop_sequences"), **_tools(given, ignored)}
    chat |= {**_thinking(given, ignored), **_output(given, ignored)}
    names = {**NAMES, **_names_of_tools(len(chat.get("tools", ())))}
    try:
        parsed = parse_fields(chat, chat=True)
    except ApiError as error:
        raise renamed(error, places, names) from None
    ignored += parsed.ignored
    return MessagesRequest(parsed.renamed(names, places), listed(ignored, strict=strict))


def parse_count(fields: Mapping[str, Any], *, strict: bool = False) -> tuple[TokenizeRequest, MessagesRequest]:
    """Return the message of a request to count tokens, and the parsed request."""
    parsed = parse_messages(fields, strict=strict, counts=True)
    message = parsed.chat.message(0)
    return TokenizeRequest(model=message.model, chat=message.chat), parsed


def _chat_messages(given: Mapping[str, Any], ignored: list[str]) -> tuple[list[Json], list[str]]:
    """Return the messages of a chat, and the place in the request where each begins. Appends the names of ignored
    fields to `ignored`."""
    made: list[tuple[Json, str]] = []
    if system := _text(given.get("system", ""), "system", "\n"):
        made.append(({"role": "system", "content": system}, "system"))
    messages = given.get("messages")
    if not isinstance(messages, list) or not messages:
        raise wrong("messages", messages, "a list of at least one message")
    for index, message in enumerate(messages):
        place = f"messages[{index}]"
        if not isinstance(message, dict):
            raise wrong(place, message, "an object")
        ignored += unread(message, place, ("role", "content", "cache_control", "id"))
        content = message.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(blocks, list):
            raise wrong(f"{place}.content", content, "text or a list of blocks")
        match message.get("role"):
            case "user":
                for turn in _of_user(blocks, place, ignored):
                    if turn["role"] == "user" and made and made[-1][0]["role"] == "user":
                        # One turn, as in Anthropic's API.
                        append_text(made[-1][0], encodable(f"{place}.content", turn["content"]), "\n\n")
                    else:
                        made.append((turn, place))
            case "assistant":
                made.append((_of_assistant(blocks, place, ignored), place))
            case "system":
                text = _text(content, f"{place}.content")
                if [at for _, at in made] == ["system"]:  # templates take one system message
                    append_text(made[0][0], encodable(f"{place}.content", text), "\n\n")
                else:
                    made.append(({"role": "system", "content": text}, place))
            case role:
                raise wrong(f"{place}.role", role, "user or assistant")
    return [message for message, _ in made], [place for _, place in made]


def _of_user(blocks: Sequence[object], place: str, ignored: list[str]) -> Iterator[Json]:
    """Yield one message for each tool result, and one for the text."""
    texts = []
    for index, block in enumerate(blocks):
        name = f"{place}.content[{index}]"
        if isinstance(block, dict) and block.get("type") == "tool_result":
            _check_fields(block, name, "tool_use_id", "content", "is_error")
            ignored += [f"{name}.is_error"] if block.get("is_error") else []  # templates have no place for it
            content = _text(block.get("content") or "", f"{name}.content")
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content}
        else:
            texts.append(_block(block, name))
    if texts or not blocks:
        yield {"role": "user", "content": "".join(texts)}


def _of_assistant(blocks: Sequence[Any], place: str, ignored: list[str]) -> Json:
    """Return the message of a chat: text, reasoning and calls."""
    text, reasoning, calls = "", "", list[Json]()
    for index, block in enumerate(blocks):
        name = f"{place}.content[{index}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "thinking":
            _check_fields(block, name, "thinking", "signature")
            if not isinstance(block.get("thinking"), str):
                raise wrong(f"{name}.thinking", block.get("thinking"), "text")
            reasoning += block["thinking"]
        elif kind == "redacted_thinking":  # only the server that wrote it can read it
            ignored.append(name)
        elif kind == "tool_use":
            _check_fields(block, name, "id", "name", "input", "caller")
            given = block.get("input") or {}  # a text if the call was cut off in its stream
            function = {
                "name": block.get("name"),
                "arguments": given if isinstance(given, str) else json.dumps(given),
            }
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        else:
            text += _block(block, name)
    others = {name: value for name, value in (("reasoning", reasoning), ("tool_calls", calls)) if value}
    return {"role": "assistant", "content": text, **others}


def _text(given: object, place: str, joint: str = "") -> str:
    """Return the text of a field that is a text or a list of blocks."""
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise wrong(place, given, "text or a list of blocks of text")
    return joint.join(_block(block, f"{place}[{index}]") for index, block in enumerate(given))


def _block(block: object, place: str) -> str:
    """Return the text of a block."""
    if not isinstance(block, dict):
        raise wrong(place, block, "an object")
    if (kind := block.get("type")) is None:
        raise wrong(f"{place}.type", None, "text")
    if kind != "text":
        raise unsupported(f"{place}.type", f"{kind!r} is not supported: models are text-only here")
    _check_fields(block, place, "text", "citations")
    if block.get("citations"):
        raise unsupported(f"{place}.citations")
    if not isinstance(block.get("text"), str):
        raise wrong(f"{place}.text", block.get("text"), "text")
    return str(block["text"])


def _check_fields(block: Mapping[str, Any], place: str, *known: str) -> None:
    for field, value in block.items():
        if field not in ("type", "cache_control", *known) and value is not None:
            raise unsupported(f"{place}.{field}")


def _names_of_tools(number: int) -> dict[str, str]:
    """Return the names of tools in chat errors, mapped to their names in this API."""
    schema = {f"tools[{index}].{field}": f"tools[{index}].input_schema" for index in range(number) for field in SCHEMAS}
    return {f"tools[{index}].function": f"tools[{index}]" for index in range(number)} | schema


def _tools(given: Mapping[str, Any], ignored: list[str]) -> Json:
    """Return the tools of a chat, and how they may be called."""
    tools, made = given.get("tools", []), []
    if not isinstance(tools, list):
        raise wrong("tools", tools, "a list")
    for index, tool in enumerate(tools):
        place = f"tools[{index}]"
        if not isinstance(tool, dict):
            raise wrong(place, tool, "an object")
        if (kind := tool.get("type")) not in ("custom", None):
            raise unsupported(f"{place}.type", f"{kind!r} is not supported: tools are the caller's own here")
        _check_fields(tool, place, "name", "description", "input_schema", "strict", *OF_A_TOOL)
        ignored += [f"{place}.{field}" for field in OF_A_TOOL if tool.get(field) not in (None, False, [], ["direct"])]
        function = {name: tool.get(name) for name in ("name", "description", "strict")}
        made.append({"type": "function", "function": function | {"parameters": tool.get("input_schema")}})
    choice = given.get("tool_choice", {"type": "auto"})
    kind = choice.get("type") if isinstance(choice, dict) else None
    if not isinstance(choice, dict):
        raise wrong("tool_choice", choice, "an object")
    if not isinstance(kind, str) or (kind != "tool" and kind not in CHOICES):
        raise wrong("tool_choice.type", kind, "auto, any, tool or none")
    single = choice.get("disable_parallel_tool_use") or False
    if not isinstance(single, bool):
        raise wrong("tool_choice.disable_parallel_tool_use", single, "true or false")
    named = {"type": "function", "function": {"name": choice.get("name")}}
    if not made and kind in ("auto", "none"):
        return {}
    return {
        "tools": made,
        "tool_choice": CHOICES.get(kind, named),
        **({"parallel_tool_calls": False} if single else {}),
    }


def _thinking(given: Mapping[str, Any], ignored: list[str]) -> Json:
    """Return whether the answer includes the reasoning: yes, unless it is disabled or omitted."""
    thinking = given.get("thinking", {})
    if not isinstance(thinking, dict):
        raise wrong("thinking", thinking, "an object")
    if (kind := thinking.get("type", "enabled")) not in list(THINKING):
        raise wrong("thinking.type", kind, f"one of {', '.join(THINKING)}")
    ignored += unread(thinking, "thinking", ("type", "display"))
    return {"include_reasoning": thinking.get("type") != "disabled" and thinking.get("display") != "omitted"}


def _output(given: Mapping[str, Any], ignored: list[str]) -> Json:
    """Return the `response_format` and the `reasoning_effort` of a chat."""
    config = given.get("output_config", {})
    if not isinstance(config, dict):
        raise wrong("output_config", config, "an object")
    ignored += unread(config, "output_config", ("format", "effort"))
    effort, wanted = config.get("effort"), config.get("format")
    if wanted is None:
        return {"reasoning_effort": effort}
    if not isinstance(wanted, dict):
        raise wrong("output_config.format", wanted, "an object")
    if (kind := wanted.get("type")) != "json_schema":
        raise wrong("output_config.format.type", kind, "json_schema")
    schema = {"name": "answer", "schema": wanted.get("schema")}
    return {"reasoning_effort": effort, "response_format": {"type": "json_schema", "json_schema": schema}}
