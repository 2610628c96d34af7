"""Tools: validates them, converts them for chat templates, and makes the grammar of a text with calls."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from orchestrator.requests.model import ServedModel
from orchestrator.requests.tagged_grammar import Marks, json_rule, tagged_call, tagged_problem
from specdec.v2 import generation_pb2, model_pb2
from specdec.wire.tool_formats import JsonCall, NamedCall, TaggedCall, ToolFormat

MAX_TOOLS = 128

NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")

NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
"""Schema of the arguments of a function without parameters."""


def tool_violations(chat: generation_pb2.ChatPrompt, model: ServedModel) -> list[tuple[str, str]]:
    """Return what is wrong with the tools of a conversation, and with the calls in it."""
    found: list[tuple[str, str]] = []
    names = [tool.name for tool in chat.tools]
    if chat.tools and not model.takes_tools:
        found.append(("chat.tools", "is set, the model's chat template takes no tools"))
    if len(names) > MAX_TOOLS:
        return [("chat.tools", f"has {len(names)} tools, must have at most {MAX_TOOLS}")]
    for index, tool in enumerate(chat.tools):
        field = f"chat.tools[{index}]"
        if not NAME.fullmatch(tool.name):
            found.append((f"{field}.name", "must have 1 to 64 letters, digits, underscores and hyphens"))
        elif tool.name in names[:index]:
            found.append((f"{field}.name", f"is {tool.name}, must be different from other tools'"))
        if problem := _schema_problem(tool.parameters):
            found.append((f"{field}.parameters", problem))
    for field, wanted in (("tool_required", chat.tool_required), ("single_tool_call", chat.single_tool_call)):
        if wanted and not names:
            found.append((f"chat.{field}", "is set, needs tools"))
    if not found:
        found += _forced_violations(chat, model)
    if chat.tool_name and chat.tool_name not in names:
        found.append(("chat.tool_name", "is the name of none of the tools"))
    for index, turn in enumerate(chat.messages):
        for place, call in enumerate(turn.tool_calls):
            if call.arguments and _object(call.arguments) is None:
                found.append((f"chat.messages[{index}].tool_calls[{place}].arguments", "is not a JSON object"))
    return found


def _forced_violations(chat: generation_pb2.ChatPrompt, model: ServedModel) -> list[tuple[str, str]]:
    """Return what is wrong with a conversation with forced calls: their format must be known, and able to express the
    arguments."""
    strict = {f"chat.tools[{index}].strict": tool.strict for index, tool in enumerate(chat.tools)}
    forcing = {
        "chat.tool_required": chat.tool_required,
        "chat.tool_name": bool(chat.tool_name),
        "chat.single_tool_call": chat.single_tool_call,
        **strict,
    }
    forcing = {field: value for field, value in forcing.items() if value}
    if not chat.tools or not forcing:
        return []
    if model.tool_format is None:
        problem = "is set, the model's chat template has no known format of calls"
        return [(field, problem) for field in forcing]
    style = model.tool_format.call
    if not isinstance(style, TaggedCall):
        return []
    problems = [(index, tagged_problem(parameters_of(tool), style)) for index, tool in enumerate(chat.tools)]
    return [(f"chat.tools[{index}].parameters", problem) for index, problem in problems if problem]


def turns_for_template(messages: Sequence[generation_pb2.ChatMessage]) -> list[dict[str, Any]]:
    """Return the turns in the shape templates expect; empty fields are left out."""

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
    """Return the tools in the shape templates expect; None if there are none."""

    def function(tool: generation_pb2.Tool) -> dict[str, Any]:
        described = {"description": tool.description} if tool.description else {}
        return {"name": tool.name, **described, "parameters": parameters_of(tool)}

    return [{"type": "function", "function": function(tool)} for tool in tools] or None


def parameters_of(tool: generation_pb2.Tool) -> dict[str, Any]:
    """Return the schema of a tool's arguments: always of type object."""
    found = _object(tool.parameters)
    return NOTHING if found is None else {"type": "object", **found}


def _schema_problem(parameters: str) -> str:
    """Return what is wrong with a schema of arguments, without compiling it."""
    if not parameters:
        return ""
    found = _object(parameters)
    if found is None:
        return "is not a JSON object"
    if found.get("type", "object") != "object":
        return "must have the type object"
    return "" if isinstance(found.get("x-guidance", {}), dict) else "has an x-guidance that is not an object"


def _object(text: str) -> dict[str, Any] | None:
    """Parse a JSON object; None if the text is not one."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def tool_grammar(chat: generation_pb2.ChatPrompt, model: ServedModel) -> model_pb2.Grammar | None:
    """Return the grammar of a text that may or must hold calls of these tools; None if it is free."""
    if not chat.tools:
        return None
    wanted, must = model.tool_format, chat.tool_required or bool(chat.tool_name)
    if wanted is None or not (must or chat.single_tool_call or any(tool.strict for tool in chat.tools)):
        return None
    tools = [tool for tool in chat.tools if chat.tool_name in ("", tool.name)]
    marks = Marks(model.tool_tokens)
    single = chat.single_tool_call or bool(chat.tool_name)
    rules = [*_calls(wanted, marks, single), *_call_rules(tools, wanted, marks)]
    rules += ["start: calls"] if must else _beside_text(wanted, marks, single)
    return model_pb2.Grammar(lark="\n".join(rules))


def _calls(wanted: ToolFormat, marks: Marks, single: bool) -> Iterator[str]:
    """Yield the rules for calls that are the whole text (`calls`), and for what follows one marker (`body`)."""
    several = False
    match wanted.call:
        case JsonCall(listed=True) as style:
            several = True
            more = "" if single else ' (", " call)*'
            yield f'body: " "? "[" call{more} "]" {marks.spelt(style.after)}'
        case JsonCall() as style:
            yield f"body: {marks.spelt(style.before)} call {marks.spelt(style.after)}"
        case NamedCall():
            yield "body: call"
        case TaggedCall() as style:
            several = style.several
            begin, line = marks.spelt(style.line if style.name[0] else ""), marks.spelt(style.line)
            more = f" ({line} call)*" if several and not single else ""
            yield f"body: {begin} call{more} {line} {marks.spelt(style.after)}"
    one = f"{marks.spelt(wanted.marker)} body"
    yield f"calls: {one}" + ("" if single or several else f" ({marks.spelt(wanted.between)} {one})*")


def _beside_text(wanted: ToolFormat, marks: Marks, single: bool) -> Iterator[str]:
    """Yield the rules for a text that may hold calls."""
    if not wanted.marker:
        yield "start: calls | PLAIN"
        yield r"PLAIN: /([^{\s](.|\n)*)?/"
        return
    yield r"TEXT: /(.|\n)*/"
    # If the marker is a special token, it cannot occur in TEXT.
    yield f"begin{'' if wanted.marker in marks.tokens else '[lazy]'}: TEXT {marks.spelt(wanted.marker)}"
    yield "start: TEXT | begin body" if single else "start: (begin body)* TEXT"


def _call_rules(tools: Sequence[generation_pb2.Tool], wanted: ToolFormat, marks: Marks) -> Iterator[str]:
    yield "call: " + " | ".join(f"call_{number}" for number in range(len(tools)))
    for number, tool in enumerate(tools):
        schema, arguments = parameters_of(tool), f"arguments_{number}"
        match wanted.call:
            case JsonCall() as style:
                head = f'{{"name": {json.dumps(tool.name)}, "{style.arguments}": '
                yield f'call_{number}: {marks.spelt(head)} {arguments} "}}"'
                yield json_rule(arguments, schema)
            case NamedCall() as style:
                head = marks.spelt(tool.name)
                if style.identifier in marks.tokens:
                    head += f" ({marks.spelt(style.identifier)} /[a-zA-Z0-9]{{9}}/)?"
                yield f"call_{number}: {head} {marks.spelt(style.opening)} {arguments}"
                yield json_rule(arguments, schema)
            case TaggedCall() as style:
                yield from tagged_call(f"call_{number}", tool.name, schema, style, wanted.marker, marks)
