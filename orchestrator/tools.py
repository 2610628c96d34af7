"""Functions that a model may call: as its chat template sees them, and what calls of them must look like."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from orchestrator.model import Model
from specdec.client.tool_formats import ToolFormat
from specdec.grammar.compiler import STYLE
from specdec.grammar.grammar import lark_string
from specdec.v2 import generation_pb2, model_pb2

MOST_TOOLS = 128

NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")

NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
"""Schema of the arguments of a function that takes none."""


def tool_violations(chat: generation_pb2.ChatPrompt, model: Model) -> list[tuple[str, str]]:
    """Return what is wrong with the functions of a conversation, and with calls in it."""
    found: list[tuple[str, str]] = []
    names = [tool.name for tool in chat.tools]
    if chat.tools and model.tool_format is None:
        found.append(("chat.tools", "is set, the model's chat template has no format of calls that is known here"))
    if len(names) > MOST_TOOLS:
        return [("chat.tools", f"has {len(names)} tools, must have at most {MOST_TOOLS}")]
    for index, tool in enumerate(chat.tools):
        field = f"chat.tools[{index}]"
        if not NAME.fullmatch(tool.name):
            found.append((f"{field}.name", "must have 1 to 64 letters, digits, underscores and hyphens"))
        elif tool.name in names[:index]:
            found.append((f"{field}.name", f"is {tool.name}, as another one's"))
        if problem := _schema_problem(tool.parameters):
            found.append((f"{field}.parameters", problem))
    for field, wanted in (("tool_required", chat.tool_required), ("single_tool_call", chat.single_tool_call)):
        if wanted and not names:
            found.append((f"chat.{field}", "is set, needs tools"))
    if chat.tool_name and chat.tool_name not in names:
        found.append(("chat.tool_name", "is the name of none of the tools"))
    for index, turn in enumerate(chat.messages):
        for place, call in enumerate(turn.tool_calls):
            if call.arguments and _object(call.arguments) is None:
                found.append((f"chat.messages[{index}].tool_calls[{place}].arguments", "is not a JSON object"))
    return found


def turns_for_template(messages: Sequence[generation_pb2.ChatMessage]) -> list[dict[str, Any]]:
    """Return the turns as templates have them: of calls and names there is only what is said."""

    def fields(turn: generation_pb2.ChatMessage) -> Iterator[tuple[str, Any]]:
        yield "role", turn.role
        yield "content", turn.content
        if turn.tool_calls:
            yield (
                "tool_calls",
                [
                    {
                        "type": "function",
                        "id": call.id,
                        "function": {"name": call.name, "arguments": _object(call.arguments or "{}")},
                    }
                    for call in turn.tool_calls
                ],
            )
        if turn.reasoning:
            yield "reasoning_content", turn.reasoning
        if turn.tool_call_id:
            yield "tool_call_id", turn.tool_call_id
        if turn.name:
            yield "name", turn.name

    return [dict(fields(turn)) for turn in messages]


def tools_for_template(tools: Sequence[generation_pb2.Tool]) -> list[dict[str, Any]] | None:
    """Return the functions as templates have them; None without any."""

    def function(tool: generation_pb2.Tool) -> dict[str, Any]:
        described = {"description": tool.description} if tool.description else {}
        return {"name": tool.name, **described, "parameters": _parameters(tool)}

    return [{"type": "function", "function": function(tool)} for tool in tools] or None


def tool_grammar(chat: generation_pb2.ChatPrompt, model: Model) -> model_pb2.Grammar | None:
    """Return the grammar of a text that may, or has to, hold calls of these functions; None if it may be anything."""
    if not chat.tools:
        return None
    wanted, must = model.tool_format, chat.tool_required or bool(chat.tool_name)
    if wanted is None or not (must or chat.single_tool_call or any(tool.strict for tool in chat.tools)):
        return None
    tools = [tool for tool in chat.tools if chat.tool_name in ("", tool.name)]
    token = model.tool_marker
    marker = _quoted(wanted.marker) if token is None else f"<[{token}]>"
    single = chat.single_tool_call or bool(chat.tool_name)
    rules = [*_calls(wanted, marker, single), *_call_rules(tools, wanted)]
    rules += ["start: calls"] if must else _beside_text(wanted, marker, single, special=token is not None)
    return model_pb2.Grammar(lark="\n".join(rules))


def _calls(wanted: ToolFormat, marker: str, single: bool) -> Iterator[str]:
    """Yield the rules of calls that are the whole text."""
    if wanted.listed:
        more = "" if single else ' (", " call)*'
        yield f'list: " "? "[" call{more} "]" {_quoted(wanted.after)}'
        yield f"calls: {marker} list"
        return
    yield f"body: {_quoted(wanted.before)} call {_quoted(wanted.after)}"
    one = f"{marker} body"
    yield f"calls: {one}" + ("" if single else f" ({_quoted(wanted.between)} {one})*")


def _beside_text(wanted: ToolFormat, marker: str, single: bool, *, special: bool) -> Iterator[str]:
    """Yield the rules of a text that may hold calls."""
    if not wanted.marker:
        yield "start: calls | PLAIN"
        yield r"PLAIN: /([^{\s](.|\n)*)?/"
        return
    yield r"TEXT: /(.|\n)*/"
    # A special token is one by itself, which no text holds.
    yield f"begin{'' if special else '[lazy]'}: TEXT {marker}"
    body = "list" if wanted.listed else "body"
    yield f"start: TEXT | begin {body}" if single else f"start: (begin {body})* TEXT"


def _call_rules(tools: Sequence[generation_pb2.Tool], wanted: ToolFormat) -> Iterator[str]:
    yield "call: " + " | ".join(f"call_{number}" for number in range(len(tools)))
    for number, tool in enumerate(tools):
        head = f'{{"name": {json.dumps(tool.name)}, "{wanted.arguments}": '
        schema = _parameters(tool)
        schema = {**schema, "x-guidance": {**STYLE, **schema.get("x-guidance", {})}}
        yield f'call_{number}: {_quoted(head)} arguments_{number} "}}"'
        yield f"arguments_{number}: %json {json.dumps(schema)}"


def _quoted(text: str) -> str:
    """Return a text as a part of a rule, where nothing stands for no text."""
    return lark_string(text) if text else ""


def _parameters(tool: generation_pb2.Tool) -> dict[str, Any]:
    """Return the schema of a function's arguments, which are an object in any case."""
    found = _object(tool.parameters)
    return NOTHING if found is None else {"type": "object", **found}


def _schema_problem(parameters: str) -> str:
    """Return what is wrong with a schema of arguments, as far as it can be told without compiling it."""
    if not parameters:
        return ""
    found = _object(parameters)
    if found is None:
        return "is not a JSON object"
    if found.get("type", "object") != "object":
        return "has another type than object: arguments are one"
    return "" if isinstance(found.get("x-guidance", {}), dict) else "has an x-guidance that is not an object"


def _object(text: str) -> dict[str, Any] | None:
    """Return the JSON object that a text is; None if it is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
