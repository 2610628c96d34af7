"""The conversation of a request for a chat's next message: its turns, its functions, and variables of its template."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from specdec.openai_api.errors import refused, unsupported

OF_TURN = {
    "name": "name",
    "reasoning": "reasoning",
    "reasoning_content": "reasoning",
    "tool_call_id": "tool_call_id",
    "tool_calls": "tool_calls",
}
"""Fields of a message besides role and content, to those of the client; servers have two names for reasoning."""

ROLES = {"developer": "system"}
"""Roles that templates know by another name."""


def conversation(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a conversation, and what its template is told besides."""
    arguments = given.get("chat_template_kwargs", {})
    if not isinstance(arguments, dict):
        raise refused("chat_template_kwargs", "must be an object")
    messages = given.get("messages")
    if not isinstance(messages, list) or not messages:
        raise refused("messages", "must be a list of at least one message")
    turns = [_message(each, f"messages[{index}]") for index, each in enumerate(messages)]
    return {"messages": turns, "template_arguments": arguments or None, **dict(_tools(given))}


def _message(message: object, name: str) -> dict[str, Any]:
    """Return a turn. Parts of text are joined; there are no others. An answer may say nothing."""
    if not isinstance(message, dict):
        raise refused(name, "must be an object")
    role, content = message.get("role"), message.get("content")
    for key, value in message.items():
        if key not in {"role", "content", "refusal", *OF_TURN} and value not in (None, [], ""):
            raise unsupported(f"{name}.{key}")
    if not isinstance(role, str):
        raise refused(f"{name}.role", "must be text")
    if role == "function":
        raise unsupported(f"{name}.role", "is of an older API: answers to calls have the role tool")
    if isinstance(content, list):
        content = "".join(_part(part, f"{name}.content[{index}]") for index, part in enumerate(content))
    if role == "assistant" and (content is None or content == ""):  # it only called, only thought, or declined
        content = message.get("refusal") or ""
    elif message.get("refusal"):
        raise refused(f"{name}.refusal", "is given beside content")
    if not isinstance(content, str):
        raise refused(f"{name}.content", "must be text, or a list of parts of text")
    own = {name: message[key] for key, name in OF_TURN.items() if message.get(key)}
    if message.get("reasoning_content") and own["reasoning"] != (message.get("reasoning") or own["reasoning"]):
        raise refused(f"{name}.reasoning_content", "is given beside another reasoning")
    return {"role": ROLES.get(role, role), "content": content, **own}


def _part(part: object, name: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise refused(name, 'must be {"type": "text", "text": ...}: models here read text alone')
    for key, value in part.items():
        if key not in ("type", "text") and value is not None:
            raise unsupported(f"{name}.{key}")
    return str(part["text"])


def _tools(given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the functions that may be called, and how; without any, nothing that is about them."""
    if tools := given.get("tools"):
        yield "tools", tools
        yield from ((name, given[name]) for name in ("tool_choice", "parallel_tool_calls") if name in given)
    elif given.get("tool_choice", "none") not in ("none", "auto"):
        raise refused("tool_choice", "needs tools")
