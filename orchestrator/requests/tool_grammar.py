"""The grammar of a text that may or must hold tool calls."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from orchestrator.requests.lark_source import Marks, json_rule
from orchestrator.requests.model import ServedModel
from orchestrator.requests.tagged_grammar import tagged_call
from orchestrator.requests.tools import parameters_of
from specdec.v2 import generation_pb2, model_pb2
from specdec.wire.tool_formats import JsonCall, NamedCall, TaggedCall, ToolFormat


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
