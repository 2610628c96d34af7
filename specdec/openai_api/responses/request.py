"""Requests of the Responses API, parsed as a chat with the same fields.

No field is ignored silently, as in `specdec/openai_api/requests.py`: the sampling fields of a chat are the same here,
the others are read below or refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specdec.openai_api.errors import ApiError, refused, unknown, unsupported
from specdec.openai_api.fields import MAX_IGNORED, UNSUPPORTED, WITHOUT_EFFECT
from specdec.openai_api.json_text import Json
from specdec.openai_api.requests import ParsedRequest, parse_fields

SAME = frozenset(
    {
        "chat_template_kwargs",
        "frequency_penalty",
        "ignore_eos",
        "logit_bias",
        "min_p",
        "min_tokens",
        "model",
        "parallel_tool_calls",
        "presence_penalty",
        "priority",
        "repetition_penalty",
        "seed",
        "specdec",
        "stop",
        "stop_token_ids",
        "stream",
        "structured_outputs",
        "temperature",
        "top_k",
        "top_p",
    }
)
"""Fields equal to those of a chat."""

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

IGNORED = WITHOUT_EFFECT | {"client_metadata"}
"""Fields about OpenAI's own accounts and caches."""

REFUSED_UNLESS: Mapping[str, tuple[object, ...]] = {
    "access_programs": (),
    "background": (False,),
    "background_options": (),
    "context_management": (),
    "conversation": (),
    "image": (),
    "max_tool_calls": (),  # of hosted tools
    "moderation": (),
    "prompt": (),
    "service_tier": ("auto", "default"),
}
"""Unsupported fields, to their accepted values: those asking for the default behaviour."""

LOGPROBS, ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"
OF_ANOTHER_API = {
    "max_tokens": "is max_output_tokens here",
    "max_completion_tokens": "is max_output_tokens here",
    "messages": "is input here",
    "n": "is not supported: a response has one answer",
    "prompt_cache_breakpoint": "is not supported",
    "response_format": "is text.format here",
}
"""Fields of chats that have another name here, or none."""

INCLUDED = (LOGPROBS, ENCRYPTED)
"""Accepted values of `include`. Reasoning items carry their text, so an encrypted copy would add nothing."""

NAMES = {
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "chat": "input",
    "prompt": "input",
    "json_schema": "text.format",
    "response_format": "text.format",
    "logprobs": "top_logprobs",
    "reasoning_effort": "reasoning.effort",
    "tool_name": "tool_choice",
    "tool_required": "tool_choice",
}
"""Names of fields of a chat, to their names here."""

CUSTOM_INPUT = "input"
"""The one argument of a custom tool's function: its input as text."""

_MESSAGE = re.compile(r"messages\[(\d+)\]")
_FIELD = re.compile(r"\w+")


@dataclass(frozen=True)
class ResponsesRequest:
    """A parsed request."""

    chat: ParsedRequest
    fields: Json  # of the body, without nulls
    items: Sequence[Json]
    """The input items of this request, without those of earlier responses."""
    custom_tools: frozenset[str]  # their names
    ignored: Sequence[str]  # names of unknown fields, for the answer

    @property
    def includes_logprobs(self) -> bool:
        return LOGPROBS in self.fields.get("include", ())


class Reader:
    """Reads a body, and makes a request of it once the items before it are known."""

    def __init__(self, fields: Mapping[str, Any], *, strict: bool = False) -> None:
        """ApiError for a field that is not supported, with `strict` for an unknown one, too."""
        self.fields = {name: value for name, value in fields.items() if value is not None}
        self.ignored = _check_names(self.fields)
        """Names of unknown fields, for the answer."""
        if self.ignored and strict:
            raise unknown(self.ignored[0])
        self.items = _input_items(self.fields.get("input"))
        self.stores = _flag(self.fields, "store")
        """Whether to store the response; None: as the server is set up."""
        self.previous = self.fields.get("previous_response_id", "")
        """The id of the response to continue; "" for none."""
        if not isinstance(self.previous, str):
            raise refused("previous_response_id", "must be text")
        if self.fields.get("truncation", "disabled") not in ("auto", "disabled"):
            raise refused("truncation", "must be auto or disabled")

    def cuts(self, earlier: Sequence[Json]) -> Iterator[int]:
        """Yield numbers of first items to drop, `earlier` ones included, until the rest fits into the context: ever
        more, each up to a message of the user. Nothing is dropped unless the request allows it."""
        if self.fields.get("truncation") == "auto":
            items = [*earlier, *self.items]
            of_user = [index for index, item in enumerate(items) if index and item.get("role") == "user"]
            yield from (of_user[min(number, len(of_user)) - 1] for number in _doubled(len(of_user)))

    def request(self, earlier: Sequence[Json] = (), cut: int = 0) -> ResponsesRequest:
        """Return the request, after the items of `earlier` responses, without the first `cut` items of both; ApiError
        if it is invalid or unsupported."""
        given, tools = self.fields, list(_tools(self.fields.get("tools", [])))
        turns = _Turns(given.get("instructions"))
        for number, item in enumerate([*earlier, *self.items][cut:], cut - len(earlier)):
            turns.add(item, "previous_response_id" if number < 0 else f"input[{number}]")
        chat = {name: value for name, value in given.items() if name in SAME}
        chat |= {"messages": turns.messages, "max_completion_tokens": given.get("max_output_tokens")}
        chat |= {"tools": [tool for tool, _ in tools] or None, "tool_choice": _tool_choice(given.get("tool_choice"))}
        chat |= {"response_format": _format(given.get("text", {})), **dict(_logprobs(given))}
        chat["reasoning_effort"] = _effort(given.get("reasoning", {}))
        _check_stream_options(given)
        try:
            parsed = parse_fields(chat, chat=True)
        except ApiError as error:
            raise _renamed(error, turns.places) from None
        custom = frozenset(tool["function"]["name"] for tool, is_custom in tools if is_custom)
        return ResponsesRequest(parsed.renamed(NAMES), given, self.items, custom, (*self.ignored, *parsed.ignored))


def _doubled(most: int) -> Iterator[int]:
    """Yield 1, 2, 4, ... up to the first number that is not below `most`; nothing for 0."""
    number = 1
    while number < most:
        yield number
        number *= 2
    if most:
        yield number


def _check_names(given: Mapping[str, Any]) -> list[str]:
    """Refuse unsupported fields; return the names of unknown ones."""
    for name, value in given.items():
        if name in REFUSED_UNLESS:
            if not any(type(value) is type(allowed) and value == allowed for allowed in REFUSED_UNLESS[name]):
                raise unsupported(name)
        elif name not in SAME | READ | IGNORED and (name in UNSUPPORTED or name in OF_ANOTHER_API):
            raise unsupported(name, OF_ANOTHER_API.get(name, "is not supported"))
    return [name for name in given if name not in SAME | READ | IGNORED | REFUSED_UNLESS.keys()][:MAX_IGNORED]


def _flag(given: Mapping[str, Any], name: str) -> bool | None:
    value = given.get(name)
    if value is not None and not isinstance(value, bool):
        raise refused(name, "must be true or false")
    return value


def _renamed(error: ApiError, places: Sequence[str]) -> ApiError:
    """Return an error about a chat in the words of this API; `places` are the messages' names here."""

    def named(text: str) -> str:
        text = _MESSAGE.sub(lambda found: places[int(found[1])], text, count=1)
        return _FIELD.sub(lambda found: NAMES.get(found[0], found[0]), text, count=1)

    return replace(error, message=named(error.message), param=None if error.param is None else named(error.param))


def _input_items(given: object) -> list[Json]:
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": given}]}]
    if not isinstance(given, list):
        raise refused("input", "must be text or a list of items")
    for index, item in enumerate(given):
        if not isinstance(item, dict):
            raise refused(f"input[{index}]", "must be an object")
    return given


class _Turns:
    """The messages of a chat, made of items. Reasoning and calls belong to an assistant's message."""

    def __init__(self, instructions: object) -> None:
        self.messages: list[Json] = []
        self.places: list[str] = []  # of each message, the item that began it
        self._reasoning = ""  # of the assistant's message to come
        if instructions is not None:
            if not isinstance(instructions, str):
                raise refused("instructions", "must be text")
            self.messages.append({"role": "system", "content": instructions})
            self.places.append("instructions")

    def add(self, item: Json, place: str) -> None:
        match item.get("type", "message"):
            case "message":
                role = item.get("role")
                content = _content(item.get("content"), f"{place}.content")
                if role == "assistant":
                    self._assistant(place, content)
                else:
                    self._append(place, {"role": role, "content": content})
            case "reasoning":
                self._reasoning += _reasoning_text(item, place)
            case "function_call":
                self._call(place, item, item.get("arguments"))
            case "custom_tool_call":
                self._call(place, item, {CUSTOM_INPUT: item.get("input")})
            case "function_call_output" | "custom_tool_call_output":
                content = _content(item.get("output"), f"{place}.output")
                self._append(place, {"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
            case kind:
                raise unsupported(f"{place}.type", f"{kind!r} is not supported")

    def _append(self, place: str, message: Json) -> None:
        self._reasoning = ""  # of an assistant that said nothing
        self.messages.append(message)
        self.places.append(place)

    def _assistant(self, place: str, content: str) -> Json:
        reasoning = {"reasoning": self._reasoning} if self._reasoning else {}
        self._append(place, {"role": "assistant", "content": content, **reasoning})
        return self.messages[-1]

    def _call(self, place: str, item: Json, arguments: object) -> None:
        last = self.messages[-1] if self.messages else {}
        turn = last if last.get("role") == "assistant" and not self._reasoning else self._assistant(place, "")
        function = {"name": item.get("name"), "arguments": arguments}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        turn.setdefault("tool_calls", []).append(call)


def _content(given: object, place: str) -> str:
    """Return the text of a message or of a call's output."""
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise refused(place, "must be text or a list of parts of text")
    return "".join(_part(part, f"{place}[{index}]") for index, part in enumerate(given))


def _part(part: object, place: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    field = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}.get(str(kind))
    if field is None:
        raise unsupported(f"{place}.type", f"{kind!r} is not supported: models are text-only here")
    assert isinstance(part, dict)
    if not isinstance(part.get(field), str):
        raise refused(f"{place}.{field}", "must be text")
    return str(part[field])


def _reasoning_text(item: Json, place: str) -> str:
    """Return the text of a reasoning item, as this server writes them."""
    content = item.get("content") or []
    if not isinstance(content, list):
        raise refused(f"{place}.content", "must be a list of parts of text")
    texts = [part.get("text") if isinstance(part, dict) else None for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise refused(f"{place}.content", "must be a list of parts of text")
    return "".join(map(str, texts))


def _tools(given: object) -> Iterator[tuple[Json, bool]]:
    """Yield the tools as functions of a chat, and whether each is a custom tool, whose input is text."""
    if not isinstance(given, list):
        raise refused("tools", "must be a list")
    for index, tool in enumerate(given):
        place = f"tools[{index}]"
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind not in ("function", "custom"):
            raise unsupported(f"{place}.type", f"{kind!r} is not supported: tools are functions or custom ones here")
        known = ("type", "name", "description", *(("parameters", "strict") if kind == "function" else ("format",)))
        for field, value in tool.items():
            if field not in known and value is not None:
                raise unsupported(f"{place}.{field}")
        function = {name: tool[name] for name in ("name", "description", "parameters", "strict") if name in tool}
        if kind == "custom":
            if (tool.get("format") or {"type": "text"}) != {"type": "text"}:
                raise unsupported(f"{place}.format", "is not supported unless it is text")
            properties = {CUSTOM_INPUT: {"type": "string"}}
            function["parameters"] = {
                "type": "object",
                "properties": properties,
                "required": [CUSTOM_INPUT],
                "additionalProperties": False,
            }
        yield {"type": "function", "function": function}, kind == "custom"


def _tool_choice(given: object) -> object:
    """Return the tool choice of a chat."""
    if not isinstance(given, dict):
        return given
    if given.get("type") not in ("function", "custom"):
        raise unsupported("tool_choice.type", f"{given.get('type')!r} is not supported")
    return {"type": "function", "function": {"name": given.get("name")}}


def _format(text: object) -> Json | None:
    """Return the `response_format` of a chat."""
    if not isinstance(text, dict):
        raise refused("text", "must be an object")
    for name, value in text.items():
        if name == "verbosity" and value not in (None, "medium"):
            raise unsupported("text.verbosity")
        if name not in ("format", "verbosity"):
            raise unknown(f"text.{name}")
    wanted = text.get("format")
    if wanted is None:
        return None
    if not isinstance(wanted, dict):
        raise refused("text.format", "must be an object")
    if wanted.get("type") != "json_schema":
        return wanted
    return {"type": "json_schema", "json_schema": {name: value for name, value in wanted.items() if name != "type"}}


def _logprobs(given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    include = given.get("include", [])
    if not isinstance(include, list):
        raise refused("include", "must be a list")
    for value in include:
        if value not in INCLUDED:
            raise unsupported("include", f"{value!r} is not supported, must be one of {', '.join(INCLUDED)}")
    if LOGPROBS in include:
        yield "logprobs", True
        yield "top_logprobs", given.get("top_logprobs", 0)
    elif given.get("top_logprobs"):
        raise refused("top_logprobs", f"needs {LOGPROBS} in include")


def _effort(given: object) -> Any:
    """Return the `reasoning_effort` of a chat."""
    if not isinstance(given, dict):
        raise refused("reasoning", "must be an object")
    for name, value in given.items():
        if name in ("summary", "generate_summary") and value not in (None, "auto"):
            raise unsupported(f"reasoning.{name}", "is not supported: the reasoning itself is in the answer")
        if name not in ("effort", "summary", "generate_summary"):
            raise unknown(f"reasoning.{name}")
    return given.get("effort")


def _check_stream_options(given: Mapping[str, Any]) -> None:
    options = given.get("stream_options", {})
    if not isinstance(options, dict):
        raise refused("stream_options", "must be an object")
    for name, value in options.items():
        if name != "include_obfuscation":
            raise unknown(f"stream_options.{name}")
        if value not in (None, False):
            raise unsupported("stream_options.include_obfuscation")
