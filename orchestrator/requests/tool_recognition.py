"""Recognises a model's tool format from the calls that its chat template writes for earlier turns."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from specdec.text.tokenizer import ChatTemplateError, Tokenizer
from specdec.wire.tool_calls import ToolCall, ToolCallReader
from specdec.wire.tool_formats import FORMATS, GRANITE, ToolFormat, written

NAME = "a_probe_of_calls"
ARGUMENTS = {"text": "a <probe>, \u00e9", "number": 3}
PARAMETERS = {"type": "object", "properties": {"text": {"type": "string"}, "number": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": NAME, "description": "A probe.", "parameters": PARAMETERS}}]

ASKED: dict[str, Any] = {"role": "user", "content": "a question"}
CALLED: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "id": "callprobe", "function": {"name": NAME, "arguments": ARGUMENTS}}],
}
"""A turn with a call. Mistral's templates require ids of nine letters and digits."""
ANSWERED: dict[str, Any] = {"role": "tool", "content": "an answer", "tool_call_id": "callprobe", "name": NAME}

NOON = datetime(2000, 1, 1, 12, tzinfo=UTC)

BY_TEXT = ((GRANITE, "<|tool_call|>"),)
"""Formats of model families whose templates describe how to write calls, but write none for earlier turns."""


def format_of(tokenizer: Tokenizer) -> ToolFormat | None:
    """Return the tool format of a model; None if its template supports no tools, or writes calls in an unknown
    format."""
    if tokenizer.chat_templates is None or not tokenizer.chat_templates.takes_tools:
        return None
    prompt = _rendered(tokenizer, [ASKED])
    for turns in ([ASKED, CALLED], [ASKED, CALLED, ANSWERED]):
        text = _rendered(tokenizer, turns)
        if text.count(NAME) > prompt.count(NAME):  # it is not only in the tool's description
            return _format_in(text, prompt)
    return next((found for found, mark in BY_TEXT if tokenizer.chat_templates.mentions(mark)), None)


def _rendered(tokenizer: Tokenizer, turns: list[dict[str, Any]]) -> str:
    """Return the text of a conversation; empty if the template refuses it."""
    try:
        return tokenizer.render(turns, NOON, tools=TOOLS)
    except ChatTemplateError:
        return ""


def _format_in(text: str, prompt: str) -> ToolFormat | None:
    """Return the format of the call in a rendered conversation after `prompt`: preferably the format whose writer
    reproduces the call exactly, else a format whose reader parses it."""
    for tool_format in FORMATS.values():
        call = written(tool_format, [(NAME, ARGUMENTS)])
        if call in text if tool_format.marker else text.startswith(prompt + call):
            return tool_format
    return next((found for found in FORMATS.values() if found.marker and _reads(found, text)), None)


def _reads(tool_format: ToolFormat, text: str) -> bool:
    reader = ToolCallReader(tool_format, {NAME: PARAMETERS})
    found = [*reader.push(text), *reader.finish()]
    calls = [call for call in found if isinstance(call, ToolCall) and call.name == NAME]
    return [json.loads(call.arguments) for call in calls] == [ARGUMENTS]
