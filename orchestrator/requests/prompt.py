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

TRUNCATED = 4
"""Maximum length of a prompt before truncation, in contexts: tokenising needs memory for the whole prompt."""


def most_prompt_tokens(message: generation_pb2.GenerateRequest, model: ServedModel) -> int:
    """Return the maximum tokens of a prompt, before it is truncated."""
    return model.context * (TRUNCATED if message.truncate_prompt_tokens else 1)


def prompt_tokens(
    message: generation_pb2.GenerateRequest, model: ServedModel, time: datetime, violations: list[tuple[str, str]]
) -> list[int]:
    """Return the prompt's tokens, truncated if requested; a chat template sees `time`. Faults are appended to
    `violations`; PromptTooLongError if there is no room for one more token."""
    kept = message.truncate_prompt_tokens
    if kept >= model.context:
        violations.append(("truncate_prompt_tokens", f"is {kept}, must be below the context of {model.context}"))
        return []
    most = most_prompt_tokens(message, model) - 1
    try:
        match message.WhichOneof("prompt"):
            case "text":
                if message.text:
                    ids = model.tokenizer.encode(message.text, limit=most)
                    return _truncated_text(message.text, ids, kept, model, violations) if kept else ids
                violations.append(("text", "is empty, must hold at least 1 character"))
            case "tokens":
                ids = list(message.tokens.ids)
                if len(ids) > most:
                    raise TooManyTokensError(f"{len(ids)} tokens")
                if not ids:
                    violations.append(("tokens.ids", "is empty, must hold at least 1 token"))
                violations += token_violations("tokens.ids", ids, model.vocabulary)
                return ids[-kept:]
            case "chat":
                size = message.chat.template_arguments.ByteSize()
                if too_long := too_many("chat.template_arguments", size, MAX_ARGUMENTS, "bytes"):
                    violations.append(too_long)
                elif wrong := tool_violations(message.chat, model) or _end_violations(message.chat):
                    violations += wrong
                elif message.chat.messages:
                    text = _rendered(message.chat, model, time)
                    return model.tokenizer.encode(text, special=False, limit=most)[-kept:]
                else:
                    violations.append(("chat.messages", "is empty, must hold at least 1 message"))
            case _:
                violations.append(("prompt", "is missing: set one of text, tokens, chat"))
    except ChatTemplateError as error:
        violations.append(("chat", str(error)))
    except TooManyTokensError as error:
        why = " to be truncated" if kept else f": the context of {model.context} leaves no room"
        raise PromptTooLongError([("prompt", f"has {error}, must have at most {most}{why}")]) from None
    return []


def _truncated_text(
    text: str, ids: list[int], kept: int, model: ServedModel, violations: list[tuple[str, str]]
) -> list[int]:
    """Return `kept` tokens: the special tokens around a text, and the last of the text's own tokens. Special tokens are
    never dropped, as in transformers."""
    if len(ids) <= kept:
        return ids
    plain = model.tokenizer.encode(text, special=False)
    added = len(ids) - len(plain)
    if added >= kept:
        problem = f"is {kept}, must be more than the {added} special tokens around a text"
        violations.append(("truncate_prompt_tokens", problem))
        return []
    before = next((at for at in range(added + 1) if ids[at : at + len(plain)] == plain), added)
    return [*ids[:before], *plain[added - kept :], *ids[before + len(plain) :]]


def time_of(message: generation_pb2.GenerateRequest, arrived: datetime, violations: list[tuple[str, str]]) -> datetime:
    """Return the current time for the chat template: the request's, else `arrived` in whole seconds."""
    if message.chat.HasField("time"):
        try:
            return message.chat.time.ToDatetime(UTC)
        except ValueError:
            given = message.chat.time
            problem = "must be in the years 1 to 9999, with 0 to 999999999 ns"
            violations.append(("chat.time", f"is {given.seconds} s and {given.nanos} ns after 1970, {problem}"))
    return arrived.replace(microsecond=0)


def _end_violations(chat: generation_pb2.ChatPrompt) -> list[tuple[str, str]]:
    """Return the violations at the end of a conversation."""
    if chat.continue_final_message and chat.messages and chat.messages[-1].tool_calls:
        return [("chat.continue_final_message", "is set, so the last message must have no tool calls")]
    return []


def _rendered(chat: generation_pb2.ChatPrompt, model: ServedModel, time: datetime) -> str:
    """Render a conversation with the model's chat template; ChatTemplateError if the template fails, PromptTooLongError
    if the result is too long."""
    try:
        arguments = _whole(json_format.MessageToDict(chat.template_arguments))
    except ValueError as error:  # a number JSON does not have, such as NaN
        raise ChatTemplateError(f"template_arguments: {error}") from None
    tools = tools_for_template(chat.tools)
    text = model.tokenizer.render(
        turns_for_template(chat.messages),
        time,
        arguments,
        tools,
        generation_prompt=not chat.no_generation_prompt,
        continues=chat.continue_final_message,
    )
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
