"""Requests of the Messages API, parsed as a chat with the same fields.

No field is ignored silently, as in `specdec/openai_api/requests.py`, except the number of tokens to think, which the
model decides: the answer says so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specdec.openai_api.conversation import conversation
from specdec.openai_api.errors import ApiError, refused, unknown, unsupported
from specdec.openai_api.fields import MAX_IGNORED, RENAMED, UNSUPPORTED
from specdec.openai_api.fields import READ as CHAT_READ
from specdec.openai_api.fields import SAME as CHAT_SAME
from specdec.openai_api.json_text import Json
from specdec.openai_api.requests import ParsedRequest, parse_fields

SAME = frozenset(
    {
        "chat_template_kwargs",
        "max_tokens",
        "min_p",
        "model",
        "priority",
        "repetition_penalty",
        "seed",
        "specdec",
        "stream",
        "temperature",
        "top_k",
        "top_p",
    }
)
"""Fields equal to those of a chat."""

READ = frozenset({"messages", "output_config", "stop_sequences", "system", "thinking", "tool_choice", "tools"})
"""Fields read below."""

IGNORED = frozenset({"cache_control", "metadata", "user_profile_id", "workspace_id"})
"""Fields about Anthropic's own accounts and caches."""

REFUSED_UNLESS: Mapping[str, tuple[object, ...]] = {
    "container": (),
    "context_management": (),
    "diagnostics": (),
    "inference_geo": (),
    "mcp_servers": ([],),
    "service_tier": ("auto", "standard_only"),
    "speed": ("standard",),
}
"""Unsupported fields, to their accepted values: those asking for the default behaviour."""

COUNTED = frozenset({"model", "messages", "system", "thinking", "tool_choice", "tools", "output_config", *IGNORED})
"""Fields of a request for a count of tokens."""

NAMES = {
    "stop": "stop_sequences",
    "json_schema": "output_config.format",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "parallel_tool_calls": "tool_choice",
}
"""Names of fields of a chat, to their names here."""

CHAT_FIELDS = CHAT_SAME | CHAT_READ | RENAMED.keys()
"""Fields of chats: those with no counterpart here are refused."""

THINKING = ("enabled", "adaptive", "between_tools", "disabled")
"""Ways to think. When a model does is decided by its template; its thoughts are left out if they are disabled."""

CHOICES = {"auto": "auto", "any": "required", "none": "none"}

_MESSAGE = re.compile(r"messages\[(\d+)\]")
_FIELD = re.compile(r"\w+")


@dataclass(frozen=True)
class MessagesRequest:
    """A parsed request."""

    chat: ParsedRequest
    ignored: tuple[str, ...]  # names of fields without effect, for the answer


def parse_messages(fields: Mapping[str, Any], *, strict: bool = False) -> MessagesRequest:
    """Parse the fields of a body; ApiError if they are invalid or unsupported. With `strict`, unknown fields are
    refused."""
    given = {name: value for name, value in fields.items() if value is not None}
    ignored = _check_names(given, SAME | READ)
    if ignored and strict:
        raise unknown(ignored[0])
    if "max_tokens" not in given:
        raise refused("max_tokens", "is missing")
    messages, places = _chat_messages(given)
    if messages[-1]["role"] == "assistant":
        problem = "is an assistant's: the text of a message cannot be continued here"
        raise unsupported(places[-1], problem)
    chat = {name: value for name, value in given.items() if name in SAME}
    chat |= {"messages": messages, "stop": given.get("stop_sequences"), **_thinking(given), **_tools(given)}
    chat |= {"response_format": _format(given), "reasoning_effort": given.get("output_config", {}).get("effort")}
    try:
        parsed = parse_fields(chat, chat=True)
    except ApiError as error:
        raise _renamed(error, places) from None
    ignored += ["thinking.budget_tokens"] if "budget_tokens" in given.get("thinking", {}) else []
    return MessagesRequest(parsed.renamed(NAMES), (*ignored[:MAX_IGNORED], *parsed.ignored))


def parse_count(fields: Mapping[str, Any]) -> tuple[str, Json]:
    """Return model and conversation, as options of the client, of a request for a count of tokens."""
    given = {name: value for name, value in fields.items() if value is not None}
    _check_names(given, COUNTED)
    if not isinstance(model := given.get("model", ""), str):
        raise refused("model", "must be text")
    messages, places = _chat_messages(given)
    _thinking(given)
    _format(given)
    try:
        options = conversation({"messages": messages, "tools": _tools(given).get("tools", [])}, [])
    except ApiError as error:
        raise _renamed(error, places) from None
    return model, options


def _check_names(given: Mapping[str, Any], known: frozenset[str]) -> list[str]:
    """Refuse unsupported fields; return the names of unknown ones."""
    for name, value in given.items():
        if name in REFUSED_UNLESS:
            if not any(type(value) is type(allowed) and value == allowed for allowed in REFUSED_UNLESS[name]):
                raise unsupported(name)
        elif name in (UNSUPPORTED.keys() | CHAT_FIELDS) - known:
            raise unsupported(name)
    return [name for name in given if name not in known | IGNORED | REFUSED_UNLESS.keys()]


def _renamed(error: ApiError, places: Sequence[str]) -> ApiError:
    """Return an error about a chat in the words of this API; `places` are the messages' names here."""

    def named(text: str) -> str:
        text = _MESSAGE.sub(lambda found: places[int(found[1])], text, count=1)
        return _FIELD.sub(lambda found: NAMES.get(found[0], found[0]), text, count=1)

    return replace(error, message=named(error.message), param=None if error.param is None else named(error.param))


def _chat_messages(given: Mapping[str, Any]) -> tuple[list[Json], list[str]]:
    """Return the messages of a chat, and the name of each in the request."""
    made: list[tuple[Json, str]] = []
    if (system := given.get("system")) is not None:
        made.append(({"role": "system", "content": _text(system, "system", "\n")}, "system"))
    messages = given.get("messages")
    if not isinstance(messages, list) or not messages:
        raise refused("messages", "must be a list of at least one message")
    for index, message in enumerate(messages):
        place = f"messages[{index}]"
        if not isinstance(message, dict):
            raise refused(place, "must be an object")
        for field, value in message.items():
            if field not in ("role", "content", "cache_control") and value is not None:
                raise unsupported(f"{place}.{field}")
        content = message.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(blocks, list):
            raise refused(f"{place}.content", "must be text or a list of blocks")
        match message.get("role"):
            case "user":
                made += [(turn, place) for turn in _of_user(blocks, place)]
            case "assistant":
                made.append((_of_assistant(blocks, place), place))
            case "system":
                made.append(({"role": "system", "content": _text(content, f"{place}.content")}, place))
            case role:
                raise refused(f"{place}.role", f"is {role!r}, must be user or assistant")
    return [message for message, _ in made], [place for _, place in made]


def _of_user(blocks: Sequence[object], place: str) -> Iterator[Json]:
    """Yield the results of calls, each a message of its own, and a message of the text."""
    texts = []
    for index, block in enumerate(blocks):
        name = f"{place}.content[{index}]"
        if isinstance(block, dict) and block.get("type") == "tool_result":
            _check_fields(block, name, "tool_use_id", "content", "is_error")
            content = _text(block.get("content") or "", f"{name}.content")
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content}
        else:
            texts.append(_block(block, name))
    if texts or not blocks:
        yield {"role": "user", "content": "".join(texts)}


def _of_assistant(blocks: Sequence[Any], place: str) -> Json:
    """Return the message of a chat: text, reasoning and calls."""
    text, reasoning, calls = "", "", list[Json]()
    for index, block in enumerate(blocks):
        name = f"{place}.content[{index}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "thinking":
            _check_fields(block, name, "thinking", "signature")
            if not isinstance(block.get("thinking"), str):
                raise refused(f"{name}.thinking", "must be text")
            reasoning += block["thinking"]
        elif kind == "tool_use":
            _check_fields(block, name, "id", "name", "input", "caller")
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        else:
            text += _block(block, name)
    others = {name: value for name, value in (("reasoning", reasoning), ("tool_calls", calls)) if value}
    return {"role": "assistant", "content": text, **others}


def _text(given: object, place: str, joint: str = "") -> str:
    """Return the text of a field that may be a list of blocks."""
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise refused(place, "must be text or a list of blocks of text")
    return joint.join(_block(block, f"{place}[{index}]") for index, block in enumerate(given))


def _block(block: object, place: str) -> str:
    """Return the text of a block."""
    kind = block.get("type") if isinstance(block, dict) else None
    if kind != "text":
        raise unsupported(f"{place}.type", f"{kind!r} is not supported: models are text-only here")
    assert isinstance(block, dict)
    _check_fields(block, place, "text", "citations")
    if block.get("citations"):
        raise unsupported(f"{place}.citations")
    if not isinstance(block.get("text"), str):
        raise refused(f"{place}.text", "must be text")
    return str(block["text"])


def _check_fields(block: Mapping[str, Any], place: str, *known: str) -> None:
    for field, value in block.items():
        if field not in ("type", "cache_control", *known) and value is not None:
            raise unsupported(f"{place}.{field}")


def _tools(given: Mapping[str, Any]) -> Json:
    """Return the tools of a chat, and how they may be called."""
    tools, made = given.get("tools", []), []
    if not isinstance(tools, list):
        raise refused("tools", "must be a list")
    for index, tool in enumerate(tools):
        place = f"tools[{index}]"
        kind = tool.get("type", "custom") if isinstance(tool, dict) else None
        if kind not in ("custom", None) or not isinstance(tool, dict):
            raise unsupported(f"{place}.type", f"{kind!r} is not supported: tools are the caller's own here")
        _check_fields(tool, place, "name", "description", "input_schema", "strict", "eager_input_streaming")
        function = {name: tool.get(name) for name in ("name", "description", "strict")}
        made.append({"type": "function", "function": function | {"parameters": tool.get("input_schema")}})
    choice = given.get("tool_choice", {"type": "auto"})
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind != "tool" and kind not in CHOICES:
        raise refused("tool_choice", "must be an object of the type auto, any, tool or none")
    named = {"type": "function", "function": {"name": choice.get("name")}}
    parallel = {"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") else {}
    if not made and kind in ("auto", "none"):
        return {}
    return {"tools": made, "tool_choice": CHOICES.get(kind, named), **parallel}


def _thinking(given: Mapping[str, Any]) -> Json:
    """Return whether the answer includes the reasoning: unless it is disabled."""
    thinking = given.get("thinking", {})
    if not isinstance(thinking, dict) or thinking.get("type", "enabled") not in THINKING:
        raise refused("thinking", f"must be an object of the type {', '.join(THINKING)}")
    for field, value in thinking.items():
        if field not in ("type", "budget_tokens", "display") and value is not None:
            raise unknown(f"thinking.{field}")
    return {"include_reasoning": thinking.get("type") != "disabled"}


def _format(given: Mapping[str, Any]) -> Json | None:
    """Return the `response_format` of a chat."""
    config = given.get("output_config", {})
    if not isinstance(config, dict):
        raise refused("output_config", "must be an object")
    for field in config:
        if field not in ("format", "effort"):
            raise unknown(f"output_config.{field}")
    wanted = config.get("format")
    if wanted is None:
        return None
    if not isinstance(wanted, dict) or wanted.get("type") != "json_schema":
        raise refused("output_config.format", "must be an object of the type json_schema")
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": wanted.get("schema")}}
