"""The conversation of a chat request: its messages, tools, and template variables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from specdec.openai_api.errors import refused, unsupported, wrong
from specdec.openai_api.fields import flag
from specdec.wire.tool_formats import MAX_TOOLS

OF_TURN = ("name", "tool_call_id", "tool_calls")
"""Message fields besides role, content and reasoning."""

PREFIX = "prefix"
"""Field that marks a final assistant message as unfinished: the answer continues it."""

MEANT = ("audio", "function_call", PREFIX)
"""Unsupported message fields that would change the prompt. Others are ignored, and listed in the answer."""

REASONING = ("reasoning", "reasoning_content")

ROLES = {"developer": "system"}
"""Roles with another name in templates."""

OF_TOOLS = frozenset({"type", "function", "name", "description", "parameters", "strict"})
OF_CALLS = frozenset({"id", "type", "function", "index"})
OF_CALLED = OF_CALLS | {"name", "arguments"}
"""Fields of tools (also of their `function`), of calls and of calls' `function`. Others are ignored, and listed in the
answer. The client refuses a known field at the wrong level. A call's `index` is its place in a stream."""

MAX_MESSAGES = 4096
MAX_CALLS = 4096
"""Maximum entries of a conversation: many small entries take long to process, relative to their bytes."""


def conversation(given: Mapping[str, Any], ignored: list[str]) -> dict[str, Any]:
    """Return the client's options for a conversation: messages, tools and template arguments. Appends the names of
    ignored fields to `ignored`."""
    arguments = given.get("chat_template_kwargs", {})
    if not isinstance(arguments, dict):
        raise wrong("chat_template_kwargs", arguments, "an object")
    messages = given.get("messages")
    if not isinstance(messages, list) or not messages:
        raise wrong("messages", messages, "a list of at least one message")
    _check_number("messages", "messages", len(messages), MAX_MESSAGES)
    _check_number("messages", "tool_calls", sum(map(_calls, messages)), MAX_CALLS)
    turns = [
        _message(message, f"messages[{index}]", ignored, last=index == len(messages) - 1)
        for index, message in enumerate(messages)
    ]
    if (effort := given.get("reasoning_effort")) is not None:  # as in vLLM, for templates that have this variable
        arguments = {"reasoning_effort": effort, **arguments}
    return {
        "messages": turns,
        "template_arguments": arguments or None,
        **dict(_tools(given, ignored)),
        **dict(_end(given, messages[-1])),
    }


def append_text(message: dict[str, Any], text: str, joint: str = "") -> None:
    """Append a text to a message's content, behind `joint` if neither is empty. The content becomes parts, so that many
    texts take linear time."""
    if isinstance(content := message["content"], str):
        message["content"] = [{"type": "text", "text": content}] if content else []
    parts = message["content"]
    if text:
        parts.append({"type": "text", "text": joint + text if parts else text})


def tool_schemas(given: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the functions' argument schemas by name, from a body already converted into a message."""
    functions = [tool["function"] for tool in given.get("tools", [])]
    found = {function["name"]: function.get("parameters") for function in functions}
    return {name: schema if isinstance(schema, dict) else {} for name, schema in found.items()}


def _end(given: Mapping[str, Any], last: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    """Yield the option for the end of the prompt; nothing if it ends with the start of an assistant turn. The last
    message may itself ask to be continued (`prefix`, as in Mistral's and DeepSeek's APIs)."""
    flags = {name: flag(given, name) for name in ("add_generation_prompt", "continue_final_message") if name in given}
    if last.get("prefix") or flags.get("continue_final_message"):
        if flags.get("add_generation_prompt"):
            raise refused("add_generation_prompt", "is true, must be false with continue_final_message")
        yield "continue_final_message", True
    elif flags.get("add_generation_prompt") is False:
        yield "add_generation_prompt", False


def _check_number(field: str, what: str, number: int, most: int) -> None:
    if number > most:
        raise refused(field, f"has {number} {what}, must have at most {most}")


def _calls(message: object) -> int:
    calls = message.get("tool_calls") if isinstance(message, dict) else None
    return len(calls) if isinstance(calls, list) else 0


def _message(message: object, name: str, ignored: list[str], *, last: bool) -> dict[str, Any]:
    """Return a message of the conversation. Text parts are joined; other kinds of parts are refused. The content of an
    assistant's message may be empty."""
    if not isinstance(message, dict):
        raise wrong(name, message, "an object")
    role, content = message.get("role"), message.get("content")
    for key, value in message.items():
        if key in {"role", "content", "refusal", *OF_TURN, *REASONING} or value in (None, [], "", False):
            continue
        if key == PREFIX and last and role == "assistant":
            if value is not True:
                raise wrong(f"{name}.{key}", value, "true or false")
            continue
        if key in MEANT:
            raise unsupported(f"{name}.{key}")
        ignored.append(f"{name}.{key}")
    if not isinstance(role, str):
        raise wrong(f"{name}.role", role, "text")
    if role == "function":
        raise unsupported(f"{name}.role", "belongs to an older API: use the role tool for results of calls")
    refusal = message.get("refusal")
    if refusal is not None and not isinstance(refusal, str):
        raise wrong(f"{name}.refusal", refusal, "text")
    if isinstance(content, list):
        content = "".join(_part(part, f"{name}.content[{index}]", ignored) for index, part in enumerate(content))
    if role == "assistant" and (content is None or content == ""):  # only tool calls, only reasoning, or a refusal
        content = refusal or ""
    elif refusal:
        raise refused(f"{name}.refusal", "is given together with content")
    if not isinstance(content, str):
        raise wrong(f"{name}.content", content, "text, or a list of parts of text")
    own = {key: message[key] for key in OF_TURN if message.get(key) is not None}
    if isinstance(calls := own.get("tool_calls"), list):
        own["tool_calls"] = [
            _tool(call, f"{name}.tool_calls[{index}]", ignored, OF_CALLS, OF_CALLED) for index, call in enumerate(calls)
        ]
    return {"role": ROLES.get(role, role), "content": content, **own, **dict(_reasoning(message, name))}


def _reasoning(message: Mapping[str, Any], name: str) -> Iterator[tuple[str, Any]]:
    """Yield the reasoning before the content; servers use two names for this field."""
    given = [message[key] for key in REASONING if message.get(key) not in (None, "")]
    if len(given) > 1 and given[0] != given[1]:
        raise refused(f"{name}.reasoning_content", "differs from reasoning: give one of them")
    yield from (("reasoning", text) for text in given[:1])


def _part(part: object, name: str, ignored: list[str]) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise refused(name, 'must be {"type": "text", "text": ...}: models are text-only here')
    ignored += [f"{name}.{key}" for key, value in part.items() if key not in ("type", "text") and value is not None]
    return str(part["text"])


def _tools(given: Mapping[str, Any], ignored: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield the tools and the tool choice; nothing without tools."""
    tools = given.get("tools", [])
    if tools != []:
        if isinstance(tools, list):
            _check_number("tools", "tools", len(tools), MAX_TOOLS)
            tools = [_tool(tool, f"tools[{index}]", ignored) for index, tool in enumerate(tools)]
        yield "tools", tools
        yield from ((name, given[name]) for name in ("tool_choice", "parallel_tool_calls") if name in given)
    elif isinstance(choice := given.get("tool_choice", "none"), dict) or choice == "required":
        raise refused("tool_choice", "needs tools")
    elif choice not in ("none", "auto"):
        raise wrong("tool_choice", choice, "auto, none, required, or a function")


def _tool(
    tool: Any, name: str, ignored: list[str], known: frozenset[str] = OF_TOOLS, inner: frozenset[str] = OF_TOOLS
) -> Any:
    """Return a tool or a call with only its `known` fields, and with only the `inner` fields of its function. The names
    of others, such as `cache_control`, are appended to `ignored`."""
    if not isinstance(tool, dict) or "function" not in tool:
        return tool
    function = tool["function"]
    if isinstance(function, dict):
        function = _known(function, f"{name}.function", ignored, inner)
    return {**_known(tool, name, ignored, known), "function": function}


def _known(given: Mapping[str, Any], name: str, ignored: list[str], known: frozenset[str]) -> dict[str, Any]:
    """Return the `known` fields; the names of others, unless they are null, are appended to `ignored`."""
    ignored += [f"{name}.{key}" for key, value in given.items() if key not in known and value is not None]
    return {key: value for key, value in given.items() if key in known}
