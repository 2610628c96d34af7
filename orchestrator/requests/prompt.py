"""The prompt of a request: its text, token ids or conversation as the model's tokens."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from google.protobuf import json_format

from orchestrator.requests.model import ServedModel
from orchestrator.requests.tools import tool_violations, tools_for_template, turns_for_template
from specdec.serving.errors import PromptTooLongError
from specdec.serving.validation import token_violations, too_many
from specdec.text.tokenizer import ChatTemplateError, TooManyTokensError
from specdec.v2 import generation_pb2

MAX_ARGUMENTS = 16 << 10
"""Largest size in bytes of a chat template's arguments."""


def prompt_tokens(
    message: generation_pb2.GenerateRequest, model: ServedModel, time: datetime, violations: list[tuple[str, str]]
) -> list[int]:
    """Return the prompt's tokens; a chat template sees `time`. Faults are appended to `violations`; PromptTooLongError
    if there is no room for one more token."""
    most = model.context - 1
    try:
        match message.WhichOneof("prompt"):
            case "text":
                if message.text:
                    return model.tokenizer.encode(message.text, limit=most)
                violations.append(("text", "is empty, must hold at least 1 character"))
            case "tokens":
                ids = list(message.tokens.ids)
                if len(ids) > most:
                    raise TooManyTokensError(f"{len(ids)} tokens")
                if not ids:
                    violations.append(("tokens.ids", "is empty, must hold at least 1 token"))
                violations += token_violations("tokens.ids", ids, model.vocabulary)
                return ids
            case "chat":
                size = message.chat.template_arguments.ByteSize()
                if too_long := too_many("chat.template_arguments", size, MAX_ARGUMENTS, "bytes"):
                    violations.append(too_long)
                elif wrong := tool_violations(message.chat, model):
                    violations += wrong
                elif message.chat.messages:
                    return model.tokenizer.encode(_rendered(message.chat, model, time), special=False, limit=most)
                else:
                    violations.append(("chat.messages", "is empty, must hold at least 1 message"))
            case _:
                violations.append(("prompt", "is missing: set one of text, tokens, chat"))
    except ChatTemplateError as error:
        violations.append(("chat", str(error)))
    except TooManyTokensError as error:
        problem = f"has {error}, the context of {model.context} leaves no room"
        raise PromptTooLongError([("prompt", problem)]) from None
    return []


def time_of(message: generation_pb2.GenerateRequest, arrived: datetime, violations: list[tuple[str, str]]) -> datetime:
    """Return the time for which a conversation is rendered: the one given, else `arrived` in whole seconds."""
    if message.chat.HasField("time"):
        try:
            return message.chat.time.ToDatetime(UTC)
        except ValueError:
            seconds = message.chat.time.seconds
            violations.append(("chat.time", f"is {seconds} s after 1970, must be in the years 1 to 9999"))
    return arrived.replace(microsecond=0)


def _rendered(chat: generation_pb2.ChatPrompt, model: ServedModel, time: datetime) -> str:
    """Render a conversation with the model's chat template; ChatTemplateError if the template fails, PromptTooLongError
    if the result is too long."""
    try:
        arguments = _whole(json_format.MessageToDict(chat.template_arguments))
    except ValueError as error:  # a number JSON does not have, such as NaN
        raise ChatTemplateError(f"template_arguments: {error}") from None
    tools = tools_for_template(chat.tools)
    text = model.tokenizer.render(turns_for_template(chat.messages), time, arguments, tools)
    if (length := len(text.encode())) > model.most_text:
        problem = f"renders to {length} bytes of text, the context has room for {model.most_text}"
        raise PromptTooLongError([("chat", problem)])
    return text


def _whole(value: Any) -> Any:
    """Return a JSON value with integral floats as ints: protobuf's Struct has floats only."""
    match value:
        case dict():
            return {name: _whole(item) for name, item in value.items()}
        case list():
            return [_whole(item) for item in value]
        case float() if value.is_integer():
            return int(value)
        case _:
            return value
