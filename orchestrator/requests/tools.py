"""Tools: validates them, converts them for chat templates, and makes the grammar of a text with calls."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import jiter

from orchestrator.requests.model import ServedModel
from orchestrator.requests.tagged_grammar import Marks, TaggedRules, json_rule, tagged_problem
from specdec.grammar.grammar import MAX_SOURCE_BYTES, GrammarError, lark_string
from specdec.grammar.json_schema.rewriter import Work
from specdec.grammar.json_schema.rewriting import supported
from specdec.serving.echo import echo
from specdec.v2 import generation_pb2, model_pb2
from specdec.wire.tool_formats import MAX_TOOLS, JsonCall, NamedCall, TaggedCall, ToolFormat

MAX_VALUES = 1 << 17
"""Maximum values, names and containers in the schemas of all tools, and in the arguments of all calls: json.loads needs
10 ms for this many."""

NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")

_SIGNS = "[{,:"
_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
"""A JSON string. An unclosed one extends to the end: a search after each of its quotes would take quadratic time."""

NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
"""Schema of the arguments of a function without parameters."""


def tool_violations(chat: generation_pb2.ChatPrompt, model: ServedModel) -> list[tuple[str, str]]:
    """Return the violations in a conversation's tools and calls."""
    found: list[tuple[str, str]] = []
    names = [tool.name for tool in chat.tools]
    if chat.tools and not model.takes_tools:
        problem = (
            "is set, but the model's chat template supports no tools; --chat-template of the orchestrator sets another"
        )
        found.append(("chat.tools", problem))
    if len(names) > MAX_TOOLS:
        return [("chat.tools", f"has {len(names)} tools, must have at most {MAX_TOOLS}")]
    # Parsing holds the GIL and so delays all other requests: texts with too many values are not parsed.
    is_parsed = True
    for what, texts in (
        ("tools", [tool.parameters for tool in chat.tools]),
        ("messages", [call.arguments for turn in chat.messages for call in turn.tool_calls]),
    ):
        if (values := _values(texts)) > MAX_VALUES:
            found.append((f"chat.{what}", f"has {values} values in JSON, must have at most {MAX_VALUES}"))
            is_parsed = False
    for index, tool in enumerate(chat.tools):
        field = f"chat.tools[{index}]"
        if not NAME.fullmatch(tool.name):
            found.append((f"{field}.name", "must have 1 to 64 letters, digits, underscores and hyphens"))
        elif tool.name in names[:index]:
            found.append((f"{field}.name", f"is {tool.name}, the name of an earlier tool"))
        if is_parsed and (problem := _schema_problem(tool.parameters)):
            found.append((f"{field}.parameters", problem))
    for field, wanted in (("tool_required", chat.tool_required), ("single_tool_call", chat.single_tool_call)):
        if wanted and not names:
            found.append((f"chat.{field}", "is set, must be set only with tools"))
    if not found:
        found += _forced_violations(chat, model)
    if chat.tool_name and chat.tool_name not in names:
        found.append(("chat.tool_name", f"is {echo(chat.tool_name)}, must be the name of one of the tools"))
    for index, turn in enumerate(chat.messages):
        for place, call in enumerate(turn.tool_calls if is_parsed else ()):
            if call.arguments and arguments_of(call) is None:
                problem = "is not a JSON object, or the beginning of one"
                found.append((f"chat.messages[{index}].tool_calls[{place}].arguments", problem))
    return found


def _forced_violations(chat: generation_pb2.ChatPrompt, model: ServedModel) -> list[tuple[str, str]]:
    """Return the violations in a conversation with forced calls: their format must be known, and able to express the
    arguments of the functions that may be called."""
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
    callable_tools = {index: tool for index, tool in enumerate(chat.tools) if _is_callable(tool.name, chat)}
    size = sum(len(tool.parameters.encode()) for tool in callable_tools.values())
    if size > MAX_SOURCE_BYTES:
        return [("chat.tools", f"has {size} bytes of parameters, must have at most {MAX_SOURCE_BYTES} to be enforced")]
    wanted, work = model.tool_format, Work()
    return [
        (f"chat.tools[{index}].parameters", problem)
        for index, tool in callable_tools.items()
        if (problem := _arguments_problem(parameters_of(tool), wanted, work))
    ]


def _is_callable(name: str, chat: generation_pb2.ChatPrompt) -> bool:
    """Return whether the text may call this tool: a named tool choice excludes the others."""
    return chat.tool_name in ("", name)


def _arguments_problem(schema: Mapping[str, Any], wanted: ToolFormat, work: Work) -> str:
    """Return why the schema of a function's arguments cannot be enforced; empty if it can."""
    if isinstance(wanted.call, TaggedCall):
        return tagged_problem(schema, wanted.call, wanted.marker, work)
    try:
        supported(schema, work)
    except GrammarError as error:
        return str(error)
    return ""


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
                        "function": {"name": call.name, "arguments": arguments_of(call)},
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


def arguments_of(call: generation_pb2.ToolCall) -> dict[str, Any] | None:
    """Return the arguments of a call in the conversation, or their existing part if they were cut short; None if they
    are not a JSON object."""
    text = call.arguments or "{}"
    return found if (found := _object(text)) is not None else _cut_object(text)


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


def _values(texts: Sequence[str]) -> int:
    """Return an upper bound on the number of values, names and containers in JSON texts."""
    found = sum(text.count(sign) for text in texts for sign in _SIGNS)
    if found <= MAX_VALUES:
        return found
    bare = (_STRING.sub("", text) for text in texts)  # strings such as source code have most of these signs
    return sum(text.count(sign) for text in bare for sign in _SIGNS)


def _schema_problem(parameters: str) -> str:
    """Return the problem with a schema of arguments, without compiling it; empty if there is none."""
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


def _cut_object(text: str) -> dict[str, Any] | None:
    """Parse a JSON object that was cut short, dropping an unfinished name, word or escape at its end; None if the text
    is anything else."""
    data = text.encode(errors="replace")
    try:
        jiter.from_json(data)
    except ValueError as error:
        if not str(error).startswith("EOF"):
            return None
    try:
        found = jiter.from_json(data, partial_mode="trailing-strings")
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def tool_grammar(
    chat: generation_pb2.ChatPrompt, model: ServedModel, answer: model_pb2.Grammar | None = None
) -> model_pb2.Grammar | None:
    """Return the grammar of a text that may or must hold calls of these tools; a text without calls must match
    `answer`. None if the text is unconstrained. GrammarError if this kind of answer cannot be combined with calls."""
    wanted, must = model.tool_format, chat.tool_required or bool(chat.tool_name)
    if not chat.tools or wanted is None:
        return answer
    held = must or chat.single_tool_call or any(tool.strict for tool in chat.tools)
    if not held and answer is None:
        return None
    # Without `held`, the grammar only distinguishes calls from the answer: arguments may be any object.
    tools = {
        tool.name: parameters_of(tool) if held else {"type": "object"}
        for tool in chat.tools
        if _is_callable(tool.name, chat)
    }
    marks = Marks(model.tool_tokens)
    single = chat.single_tool_call or bool(chat.tool_name)
    beside_json = answer is not None and not must and not wanted.marker
    if must:
        start: Iterable[str] = ["start: calls"]
    elif answer is None:
        start = _beside_text(wanted, marks, single)
    else:
        start = chain(["start: calls | answer"], _answer_rules(answer))
    of_calls = _call_rules(tools, wanted, marks, as_json=beside_json)
    found = model_pb2.Grammar(lark=_joined(chain(_calls(wanted, marks, single), of_calls, start)))
    for field in ("after_token", "opening_token"):
        if answer is not None and answer.HasField(field):
            setattr(found, field, getattr(answer, field))
    return found


def _joined(rules: Iterable[str]) -> str:
    """Return a source of these rules; GrammarError once it is too long: short schemas may expand to many megabytes."""
    lines, size = list[str](), 0
    for rule in rules:
        lines.append(rule)
        size += len(rule) + 1
        if size > MAX_SOURCE_BYTES:
            raise GrammarError(f"takes more than {MAX_SOURCE_BYTES} bytes with the tools written out")
    return "\n".join(lines)


def _answer_rules(answer: model_pb2.Grammar) -> Iterator[str]:
    """Yield the rules for a text that is an answer, not calls."""
    match answer.WhichOneof("kind"):
        case "json_schema":
            schema = _object(answer.json_schema)
            if schema is None:
                raise GrammarError("is not a JSON object")
            yield json_rule("answer", schema)
        case "regex":
            yield "answer: ANSWER"
            yield f"ANSWER: /{_in_slashes(answer.regex)}/"
        case "choice":
            yield "answer: " + " | ".join(map(lark_string, answer.choice.texts))
        case _:
            raise GrammarError("is in Lark, which cannot be combined with tools: use a JSON schema, regex or choice")


def _in_slashes(expression: str) -> str:
    """Return a regular expression escaped for use between slashes, on one line."""
    spelt = {"/": r"\/", "\n": r"\n", "\r": r"\r", "\\\n": r"\n", "\\\r": r"\r"}
    return re.sub(r"\\.|[/\n\r]", lambda found: spelt.get(found[0], found[0]), expression, flags=re.DOTALL)


def _calls(wanted: ToolFormat, marks: Marks, single: bool) -> Iterator[str]:
    """Yield the rules for calls that are the whole text (`calls`), and for the text after one marker (`body`)."""
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


def _call_rules(
    tools: Mapping[str, Mapping[str, Any]], wanted: ToolFormat, marks: Marks, *, as_json: bool
) -> Iterator[str]:
    """Yield the rules for one call. With `as_json`, one rule for JSON covers the whole call: the lexer could not tell
    fixed characters of a call from an answer in JSON."""
    yield "call: " + " | ".join(f"call_{number}" for number in range(len(tools)))
    for number, (name, schema) in enumerate(tools.items()):
        arguments = f"arguments_{number}"
        match wanted.call:
            case JsonCall() as style if as_json:
                yield json_rule(f"call_{number}", _call_schema(name, style, supported(schema)))
            case JsonCall() as style:
                head = f'{{"name": {json.dumps(name)}, "{style.arguments}": '
                yield f'call_{number}: {marks.spelt(head)} {arguments} "}}"'
                yield json_rule(arguments, supported(schema))
            case NamedCall() as style:
                head = marks.spelt(name)
                if style.identifier in marks.tokens:
                    head += f" ({marks.spelt(style.identifier)} /[a-zA-Z0-9]{{9}}/)?"
                yield f"call_{number}: {head} {marks.spelt(style.opening)} {arguments}"
                yield json_rule(arguments, supported(schema))
            case TaggedCall() as style:
                yield from TaggedRules(style, wanted.marker, marks).call(f"call_{number}", name, schema)


def _call_schema(name: str, style: JsonCall, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a whole call; its arguments' definitions and `x-guidance` move to the top level."""
    shared = {key: schema[key] for key in ("$defs", "x-guidance") if key in schema}
    arguments = {key: value for key, value in schema.items() if key not in shared}
    return {
        "type": "object",
        "properties": {"name": {"const": name}, style.arguments: arguments},
        "required": ["name", style.arguments],
        "additionalProperties": False,
        **shared,
    }
