"""Conversion of functions and calls in the form of OpenAI's API to a message."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from specdec.client.fields import put
from specdec.v2 import generation_pb2 as pb

_OF_A_FUNCTION = ("type", "function")


def put_tools(chat: pb.ChatPrompt, tools: object) -> None:
    """Set the functions; TypeError or ValueError names the problem."""
    if isinstance(tools, str | bytes | Mapping) or not isinstance(tools, Iterable):
        raise TypeError(f"tools = {tools!r}: must be a list of functions")
    for index, tool in enumerate(tools):
        option = f"tools[{index}]"
        function = _function(tool, option, "name", "description", "parameters", "strict")
        _check_fields(tool, option, _OF_A_FUNCTION)
        message = chat.tools.add()
        for field in ("name", "description", "strict"):
            put(message, field, f"{option}.function.{field}", function.get(field))
        if function.get("parameters") is not None:
            put(message, "parameters", f"{option}.function.parameters", _json(function["parameters"], option))


def put_tool_choice(chat: pb.ChatPrompt, choice: object) -> None:
    """Set whether functions are called; ValueError for an unknown choice."""
    if isinstance(choice, Mapping):
        function = _function(choice, "tool_choice", "name")
        _check_fields(choice, "tool_choice", _OF_A_FUNCTION)
        put(chat, "tool_name", "tool_choice.function.name", function.get("name"))
    elif choice == "required":
        chat.tool_required = True
    elif choice not in ("auto", "none"):
        raise ValueError(f"tool_choice = {choice!r}: not one of auto, none, required, or a function")


def put_tool_calls(turn: pb.ChatMessage, option: str, calls: object) -> None:
    """Set the calls of a turn, with arguments as JSON text or a mapping; TypeError or ValueError names the problem."""
    if isinstance(calls, str | bytes | Mapping) or not isinstance(calls, Iterable):
        raise TypeError(f"{option} = {calls!r}: must be a list of calls")
    for index, call in enumerate(calls):
        name = f"{option}[{index}]"
        function = _function(call, name, "name", "arguments")
        message = turn.tool_calls.add()
        put(message, "id", f"{name}.id", call.get("id"))
        put(message, "name", f"{name}.function.name", function.get("name"))
        given = function.get("arguments", "{}")
        put(message, "arguments", f"{name}.function.arguments", given if isinstance(given, str) else _json(given, name))


def _function(given: object, option: str, *fields: str) -> Mapping[str, Any]:
    """Return the part `function` of a function or a call, after checking that it has no other fields than these."""
    if not isinstance(given, Mapping) or given.get("type", "function") != "function":
        raise ValueError(f'{option} = {given!r}: must have the type "function"')
    function = given.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"{option}.function = {function!r}: must have a name")
    _check_fields(function, f"{option}.function", fields)
    return function


def _check_fields(given: Mapping[str, Any], option: str, known: Iterable[str]) -> None:
    for field, value in given.items():
        if field not in known and value is not None:
            raise ValueError(f"{option}.{field} = {value!r}: not one of {', '.join(known)}")


def _json(value: object, option: str) -> str:
    """Return the JSON of an object."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{option} = {value!r}: must be an object")
    try:
        return json.dumps(value, allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{option} = {value!r}: {error}") from error
