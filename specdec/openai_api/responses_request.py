"""Requests of the Responses API, translated into chat fields and parsed as a chat.

Fields in `SAME` mean the same as in chats; fields in `READ` are read below. As for chats, unknown fields are ignored
and listed in the answer; unsupported ones are refused (`specdec/openai_api/fields.py`).
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specdec.openai_api.conversation import append_text
from specdec.openai_api.errors import ApiError, refused, renamed, unsupported, wrong
from specdec.openai_api.fields import (
    CHAT_FIELDS,
    SAMPLING,
    WITHOUT_EFFECT,
    Unsupported,
    alike,
    check_names,
    encodable,
    flag,
    listed,
    unread,
)
from specdec.openai_api.json_text import Json
from specdec.openai_api.requests import ParsedRequest, parse_fields
from specdec.openai_api.responses_echo import NESTED, check_labels, echoed
from specdec.openai_api.responses_tools import CUSTOM_INPUT, OfferedTool, chosen, function_name, offered, places_of

SAME = SAMPLING | frozenset(
    {
        "allowed_token_ids",
        "bad_words",
        "cache_salt",
        "chat_template_kwargs",
        "frequency_penalty",
        "ignore_eos",
        "include_reasoning",
        "include_stop_str_in_output",
        "logit_bias",
        "min_tokens",
        "model",
        "parallel_tool_calls",
        "presence_penalty",
        "priority",
        "seed",
        "skip_special_tokens",
        "specdec",
        "stop",
        "stop_token_ids",
        "stream",
        "structured_outputs",
        "top_k",
        "truncate_prompt_tokens",
    }
)
"""Fields with the same name and meaning as in chats."""

OF_AN_ITEM = frozenset(
    {
        *("type", "id", "status", "role", "content", "name", "namespace", "call_id", "arguments", "input", "output"),
        *("summary", "encrypted_content"),
    }
)
"""Fields of input items, including the ones this server writes; others are ignored and listed in the answer."""

OF_A_PART = frozenset({"type", "text", "refusal", "annotations", "logprobs"})
"""Fields of content parts."""

READ = frozenset(
    {
        "include",
        "input",
        "instructions",
        "max_output_tokens",
        "previous_response_id",
        "reasoning",
        "store",
        "stream_options",
        "text",
        "tool_choice",
        "tools",
        "top_logprobs",
        "truncation",
    }
)
"""Fields read below."""

OWN_WITHOUT_EFFECT = WITHOUT_EFFECT | {"client_metadata"}

OWN_UNSUPPORTED: Mapping[str, Unsupported] = {
    "access_programs": Unsupported(),
    "background": Unsupported((False,)),
    "background_options": Unsupported(),
    "context_management": Unsupported(),
    "conversation": Unsupported(instead="use previous_response_id"),
    "image": Unsupported(),
    "max_tool_calls": Unsupported(),  # of hosted tools
    "prompt": Unsupported(),
}
"""Unsupported fields, in addition to those of chats."""

LOGPROBS, ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"
INCLUDED = (LOGPROBS, ENCRYPTED)
"""Supported values of `include`."""

OF_WEB_SEARCH = "web_search_call."
"""Prefix of the values of `include` for a web search. They are ignored, as an optional web search is."""

CARRIER = "specdec:"
"""Prefix of `encrypted_content`, which carries the reasoning text for clients that return only this field."""

NAMES = {
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "chat": "input",
    "prompt": "input",
    "json_schema": "text.format",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "logprobs": "top_logprobs",
    "reasoning_effort": "reasoning.effort",
    "tool_name": "tool_choice",
    "tool_required": "tool_choice",
}
"""Chat field names, mapped to names in this API."""

HINTS = dict.fromkeys(CHAT_FIELDS, "is a field of chats") | {
    name: f"is {NAMES[name]} here" for name in NAMES.keys() & CHAT_FIELDS
}
"""Chat fields with another name here, or without a counterpart."""

INSTRUCTIONS = "instructions"
"""The field with the system message."""

SYSTEM = ("system", "developer")
"""Roles of system messages."""

TRUNCATIONS = ["auto", "disabled"]


@dataclass(frozen=True)
class ResponsesRequest:
    """A parsed request."""

    chat: ParsedRequest
    echoed: Json
    """The fields of the response that repeat the request."""
    includes: frozenset[str]
    items: Sequence[Json]
    """The input items of this request, without those of earlier responses."""
    tools: Mapping[str, OfferedTool]  # by function name; `function` is empty
    ignored: Sequence[str]  # names of unknown fields, for the answer

    @property
    def includes_logprobs(self) -> bool:
        return LOGPROBS in self.includes

    @property
    def includes_encrypted(self) -> bool:
        return ENCRYPTED in self.includes


class ResponsesReader:
    """Reads a body, and builds the request once the items of earlier responses are known."""

    def __init__(self, fields: Mapping[str, Any], *, strict: bool = False) -> None:
        """ApiError for an unsupported field. With `strict`, `request` refuses unknown ones."""
        self.fields = {name: value for name, value in fields.items() if value is not None}
        if self.fields.get("previous_response_id") == "":  # continues none
            del self.fields["previous_response_id"]
        self.ignored = check_names(
            self.fields, SAME | READ, hints=HINTS, without_effect=OWN_WITHOUT_EFFECT, others=OWN_UNSUPPORTED
        )
        """Names of unknown fields, for the answer."""
        self._strict = strict
        self._read_nested()
        check_labels(self.fields)
        self.stores = flag(self.fields, "store") if "store" in self.fields else None
        """Value of `store`; None if the request leaves it to the server."""
        self.previous = self.fields.get("previous_response_id", "")
        """The id of the response to continue; "" for none."""
        if not isinstance(self.previous, str):
            raise wrong("previous_response_id", self.previous, "text")
        self.items = _input_items(self.fields.get("input", [] if self.previous else None))
        if (truncation := self.fields.get("truncation", "disabled")) not in TRUNCATIONS:
            raise wrong("truncation", truncation, f"one of {', '.join(TRUNCATIONS)}")
        if alike(self.fields.get("max_output_tokens"), 0):  # valid only with prompt_logprobs
            raise wrong("max_output_tokens", 0, "at least 1")

    def _read_nested(self) -> None:
        """Refuse wrong values in nested fields that are not read below, and collect the names of ignored ones."""
        for field, known in NESTED.items():
            given = self.fields.get(field, {})
            if not isinstance(given, dict):
                raise wrong(field, given, "an object")
            self.ignored += unread(given, field, known)
        if (self.fields.get("text") or {}).get("verbosity", "medium") not in (None, "medium"):
            raise unsupported("text.verbosity")
        if (self.fields.get("stream_options") or {}).get("include_obfuscation"):
            raise unsupported("stream_options.include_obfuscation")

    def cuts(self, earlier: Sequence[Json]) -> Iterator[int]:
        """Yield increasing numbers of leading items to drop, `earlier` ones included, for retries while the prompt is
        too long. After each cut, a user message comes first. Yield nothing unless the request allows truncation."""
        if self.fields.get("truncation") == "auto":
            items = [*earlier, *self.items]
            of_user = [index for index, item in enumerate(items) if index and item.get("role") == "user"]
            yield from (of_user[min(number, len(of_user)) - 1] for number in _doubled(len(of_user)))

    def request(self, earlier: Sequence[Json] = (), cut: int = 0) -> ResponsesRequest:
        """Return the request: the items of `earlier` responses, then its own, without the first `cut` items. ApiError
        if it is invalid or unsupported."""
        given, left_out = self.fields, list[str]()
        tools = offered(given.get("tools", []), given.get("tool_choice"), left_out)
        turns = _Turns(given.get(INSTRUCTIONS))
        for number, item in enumerate([*earlier, *self.items][cut:], cut - len(earlier)):
            turns.add(item, "previous_response_id" if number < 0 else f"input[{number}]")
        chat = {name: value for name, value in given.items() if name in SAME}
        chat |= {"messages": turns.messages, "max_completion_tokens": given.get("max_output_tokens")}
        chat |= {"tools": [{"type": "function", "function": tool.function} for tool in tools] or None}
        chat["tool_choice"] = chosen(given.get("tool_choice"), tools)
        chat |= {"response_format": _format(given.get("text", {})), **dict(_logprobs(given))}
        included = given.get("include", ())
        left_out += [f"include[{number}]" for number, part in enumerate(included) if part not in INCLUDED]
        chat["reasoning_effort"] = given.get("reasoning", {}).get("effort")
        names = {**NAMES, **places_of(tools)}
        try:
            parsed = parse_fields(chat, chat=True)
        except ApiError as error:
            raise renamed(error, turns.places, names) from None
        ignored = (*self.ignored, *left_out, *turns.ignored, *parsed.ignored)
        by_name = {tool.function_name: replace(tool, function={}) for tool in tools}  # schemas may be megabytes
        return ResponsesRequest(
            chat=parsed.renamed(names, turns.places),
            echoed=echoed(given),
            includes=frozenset(included),
            items=self.items,
            tools=by_name,
            ignored=listed(ignored, strict=self._strict),
        )


def _doubled(most: int) -> Iterator[int]:
    """Yield 1, 2, 4, ... up to the first number that is not below `most`; nothing for 0."""
    number = 1
    while number < most:
        yield number
        number *= 2
    if most:
        yield number


def _input_items(given: object) -> list[Json]:
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": given}]}]
    if not isinstance(given, list):
        raise wrong("input", given, "text or a list of items")
    for index, item in enumerate(given):
        if not isinstance(item, dict):
            raise wrong(f"input[{index}]", item, "an object")
    return given


class _Turns:
    """The messages of a chat, built from items. Reasoning and calls belong to an assistant's message. Leading system
    items belong to the message of the instructions: many templates accept one system message only."""

    def __init__(self, instructions: object) -> None:
        self.messages: list[Json] = []
        self.places: list[str] = []  # for each message, the item that began it
        self.ignored: list[str] = []  # names of fields without effect
        self._reasoning: list[str] = []  # parts, of the next assistant message
        if instructions is not None and not isinstance(instructions, str):
            raise wrong(INSTRUCTIONS, instructions, "text")
        if instructions:
            self._append(INSTRUCTIONS, {"role": "system", "content": instructions})

    def add(self, item: Json, place: str) -> None:
        self.ignored += unread(item, place, OF_AN_ITEM)
        match item.get("type", "message"):
            case "message":
                role = item.get("role")
                content = self._content(item.get("content"), f"{place}.content")
                if role == "assistant":
                    self._said(place, content)
                elif role in SYSTEM and item.get("name") is None and self.places == [INSTRUCTIONS]:
                    self._reasoning = []
                    append_text(self.messages[0], encodable(f"{place}.content", content), "\n\n")
                else:
                    named = {"name": item["name"]} if item.get("name") is not None else {}
                    self._append(place, {"role": role, "content": content, **named})
            case "reasoning":
                text = _reasoning_text(item, place)
                if text is None:
                    self.ignored.append(place)
                self._reasoning += [text] if text else []
            case "function_call":
                self._call(place, item, item.get("arguments"))
            case "custom_tool_call":
                self._call(place, item, {CUSTOM_INPUT: item.get("input")})
            case "function_call_output" | "custom_tool_call_output":
                content = self._content(item.get("output"), f"{place}.output")
                self._append(place, {"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
            case kind:
                raise unsupported(f"{place}.type", f"{kind!r} is not supported")

    def _content(self, given: object, place: str) -> str:
        """Return the text of a message or of a call's output."""
        if isinstance(given, str):
            return given
        if not isinstance(given, list):
            raise wrong(place, given, "text or a list of parts of text")
        texts = [_part(part, f"{place}[{index}]") for index, part in enumerate(given)]
        for index, part in enumerate(given):
            self.ignored += unread(part, f"{place}[{index}]", OF_A_PART)
        return "".join(texts)

    def _append(self, place: str, message: Json) -> None:
        self._reasoning = []  # this message has the reasoning, or no assistant message follows it
        self.messages.append(message)
        self.places.append(place)

    def _assistant(self, place: str, content: str) -> Json:
        reasoning = {"reasoning": "".join(self._reasoning)} if self._reasoning else {}
        self._append(place, {"role": "assistant", "content": content, **reasoning})
        return self.messages[-1]

    @property
    def _open(self) -> Json:
        """The last message if it is an assistant's to which the next item may belong, else an empty one."""
        last = self.messages[-1] if self.messages else {}
        return last if last.get("role") == "assistant" and not self._reasoning else {}

    def _said(self, place: str, content: str) -> None:
        """Add an assistant's text. Behind calls it belongs to their message, as in a chat: between a call and its
        output, templates accept no other message."""
        if "tool_calls" in (turn := self._open):
            append_text(turn, encodable(f"{place}.content", content))
        else:
            self._assistant(place, content)

    def _call(self, place: str, item: Json, arguments: object) -> None:
        turn = self._open or self._assistant(place, "")
        function = {"name": function_name(item.get("name"), item.get("namespace")), "arguments": arguments}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        turn.setdefault("tool_calls", []).append(call)


def _part(part: object, place: str) -> str:
    if not isinstance(part, dict):
        raise wrong(place, part, "an object")
    if (kind := part.get("type")) is None:
        raise wrong(f"{place}.type", None, "input_text, output_text or refusal")
    field = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}.get(str(kind))
    if field is None:
        raise unsupported(f"{place}.type", f"{kind!r} is not supported: models are text-only here")
    if not isinstance(part.get(field), str):
        raise wrong(f"{place}.{field}", part.get(field), "text")
    return str(part[field])


def _reasoning_text(item: Json, place: str) -> str | None:
    """Return the text of a reasoning item; None if it has none in this server's format."""
    carried = item.get("encrypted_content")
    if not item.get("content") and isinstance(carried, str) and carried.startswith(CARRIER):
        return decoded(carried)
    content = item.get("content") or []
    if not isinstance(content, list):
        raise wrong(f"{place}.content", content, "a list of parts of text")
    texts = [part.get("text") if isinstance(part, dict) else None for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise refused(f"{place}.content", "must be a list of parts of text")
    return "".join(map(str, texts)) if texts else None


def carried(text: str) -> str:
    """Return a reasoning text as `encrypted_content`."""
    return CARRIER + base64.b64encode(text.encode(errors="replace")).decode()


def decoded(content: str) -> str | None:
    """Return the reasoning in an `encrypted_content`; None if it is damaged."""
    try:
        return base64.b64decode(content.removeprefix(CARRIER), validate=True).decode()
    except ValueError:
        return None


def _format(text: Json) -> Json | None:
    """Return the `response_format` of a chat."""
    wanted = text.get("format")
    if wanted is None:
        return None
    if not isinstance(wanted, dict):
        raise wrong("text.format", wanted, "an object")
    if wanted.get("type") != "json_schema":
        return wanted
    return {"type": "json_schema", "json_schema": {name: value for name, value in wanted.items() if name != "type"}}


def _logprobs(given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    include = given.get("include", [])
    if not isinstance(include, list):
        raise wrong("include", include, "a list")
    for value in include:
        if not isinstance(value, str) or (value not in INCLUDED and not value.startswith(OF_WEB_SEARCH)):
            raise unsupported("include", f"{value!r} is not supported, must be one of {', '.join(INCLUDED)}")
    if LOGPROBS in include:
        yield "logprobs", True
        yield "top_logprobs", given.get("top_logprobs", 0)
    elif given.get("top_logprobs"):
        raise refused("top_logprobs", f"needs {LOGPROBS} in include")
