"""Conversations for chat templates, and their rendering by transformers and by this project."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer
from transformers import PreTrainedTokenizerFast

from orchestrator.requests.model import ServedModel
from orchestrator.requests.tools import tool_violations, tools_for_template, turns_for_template
from specdec.engine.model_directory import ModelDirectory
from specdec.engine.model_file import ModelDirectoryError
from specdec.text.tokenizer import ChatTemplateError
from specdec.v2 import generation_pb2

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "Where, as in <Köln>."},
        "days": {"type": "integer", "description": "How many."},
    },
    "required": ["city"],
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "get_weather", "description": "Tells it.", "parameters": WEATHER}}
]
CALL = {"id": "abcdef123", "name": "get_weather", "arguments": {"city": "Köln", "days": 3}}

Turn = dict[str, Any]


def said(role: str, content: str, **others: Any) -> Turn:
    return {"role": role, "content": content, **others}


@dataclass(frozen=True)
class Conversation:
    """A conversation in the callers' form: `tool_calls` have the fields of the message ToolCall."""

    name: str
    turns: list[Turn]
    tools: list[dict[str, Any]] | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)


ASKED = said("user", "How warm <is> it in Köln?\n")
CONVERSATIONS = [
    Conversation("user", [ASKED]),
    Conversation("system and user", [said("system", " Be brief. "), ASKED]),
    Conversation("turns", [ASKED, said("assistant", "Warm.\n"), said("user", "And now?")]),
    Conversation("tools", [said("system", "Be brief."), ASKED], TOOLS),
    Conversation(
        "tool result",
        [
            ASKED,
            said("assistant", "", tool_calls=[CALL]),
            said("tool", '{"degrees": 21}', tool_call_id=CALL["id"], name=CALL["name"]),
        ],
        TOOLS,
    ),
    Conversation(
        "reasoning",
        [ASKED, said("assistant", "Warm.", reasoning="It is <June>."), said("user", "And now?")],
        arguments={"enable_thinking": False},
    ),
]


class Refused(str):
    """The error of a conversation that cannot be rendered."""

    __slots__ = ()


class RefusedByRule(Refused):
    """The error of a conversation that a rule of this project refuses before the template runs."""

    __slots__ = ()


def by_transformers(tokenizer: FastTokenizer, template: Any, conversation: Conversation) -> str:
    """Render by transformers' `apply_chat_template`."""
    own = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **SPECIAL)
    turns = [_openai_turn(turn) for turn in conversation.turns]
    try:
        return str(
            own.apply_chat_template(
                turns,
                tools=conversation.tools,
                tokenize=False,
                add_generation_prompt=True,
                **conversation.arguments,
            )
        )
    except Exception as error:  # a template is a program: it may raise anything
        return Refused(error)


def _openai_turn(turn: Turn) -> Turn:
    calls = [
        {"type": "function", "id": call["id"], "function": {"name": call["name"], "arguments": call["arguments"]}}
        for call in turn.get("tool_calls", [])
    ]
    others = {"reasoning_content" if name == "reasoning" else name: value for name, value in turn.items()}
    return others | ({"tool_calls": calls} if calls else {})


def model_with(source: Path, directory: Path, files: Mapping[str, str], **settings: Any) -> ServedModel | Refused:
    """Return a copy of model `source` with these template files and tokenizer_config.json settings."""
    shutil.copytree(source, directory, ignore=lambda *_: ["tokenizer_config.json"])
    (directory / "tokenizer_config.json").write_text(json.dumps(SPECIAL | settings))
    for name, text in files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(text, encoding="utf-8")
    try:
        return ServedModel.of(ModelDirectory(directory))
    except ModelDirectoryError as error:
        return Refused(error)


def chat_of(conversation: Conversation) -> generation_pb2.ChatPrompt:
    chat = generation_pb2.ChatPrompt()
    for turn in conversation.turns:
        calls = [
            generation_pb2.ToolCall(**(call | {"arguments": json.dumps(call["arguments"])}))
            for call in turn.get("tool_calls", [])
        ]
        chat.messages.add(**{name: value for name, value in turn.items() if name != "tool_calls"}, tool_calls=calls)
    for tool in conversation.tools or []:
        function = tool["function"]
        chat.tools.add(**(function | {"parameters": json.dumps(function["parameters"])}))
    return chat


def by_us(model: ServedModel | Refused, conversation: Conversation) -> str:
    """Render a conversation as for a request."""
    if isinstance(model, Refused):
        return model
    chat = chat_of(conversation)
    if violations := tool_violations(chat, model):
        return RefusedByRule(violations[0])
    try:
        tools = tools_for_template(chat.tools)
        return model.tokenizer.render(turns_for_template(chat.messages), datetime.now(), conversation.arguments, tools)
    except ChatTemplateError as error:
        return Refused(error)
