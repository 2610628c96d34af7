"""Models' formats of tool calls in text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

MAX_TOOLS = 128
"""Maximum tools of a conversation."""


@dataclass(frozen=True)
class ToolCall:
    """A call: the function's name, and its arguments as a JSON object."""

    name: str
    arguments: str


@dataclass(frozen=True)
class JsonCall:
    """A JSON object with two keys: "name", and the one given as `arguments`. If calls are `listed`, a list of such
    objects."""

    arguments: str = "arguments"
    listed: bool = False
    before: str = ""
    after: str = ""


@dataclass(frozen=True)
class NamedCall:
    """The function's name, then `opening` and the arguments as a JSON object. `identifier` and an id may follow the
    name."""

    opening: str
    identifier: str


@dataclass(frozen=True)
class TaggedCall:
    """Tags around the function's name, around each argument's name and around its value.

    A string value is written verbatim, any other as JSON; the function's schema decides which.
    """

    name: tuple[str, str]
    key: tuple[str, str]
    value: tuple[str, str]
    end: str
    after: str
    line: str = "\n"
    """Separates two tags."""
    pad: str = ""
    """Surrounds each value."""
    several: bool = False
    """True if the next call follows without its own marker."""


@dataclass(frozen=True)
class ToolFormat:
    """A format. Each call follows `marker`; without one, the whole text is calls."""

    name: str
    marker: str
    call: JsonCall | NamedCall | TaggedCall
    between: str = ""
    """Separates two calls that each have a marker."""

    @property
    def closing(self) -> str:
        """The tag after a call; empty if there is none."""
        return "" if isinstance(self.call, NamedCall) else self.call.after.strip()

    def begins_tag(self, text: str) -> bool:
        """Return whether a text, found behind a call, is the beginning of the tag that closes the call, or of another
        call without a marker of its own."""
        style = self.call
        opening = style.name[0] if isinstance(style, TaggedCall) and style.several else ""
        begins_another = bool(opening) and (opening.startswith(text) or text.startswith(opening))
        return begins_another or self.closing.startswith(text)

    @property
    def marks(self) -> frozenset[str]:
        """Fixed texts of the format that are special tokens in some vocabularies."""
        style = self.call
        match style:
            case JsonCall():
                found = [style.after.strip()]
            case NamedCall():
                found = [style.opening, style.identifier]
            case TaggedCall():
                found = [*style.name, *style.key, *style.value, style.end, style.after]
        return frozenset(text for text in (self.marker, *found) if text)


_HERMES_CALL = JsonCall(before="\n", after="\n</tool_call>")
_QWEN_CODER_CALL = TaggedCall(
    ("<function=", ">"), ("<parameter=", ">"), ("", "</parameter>"), "</function>", "</tool_call>", pad="\n"
)
_SEED_CALL = TaggedCall(
    ("<function=", ">"), ("<parameter=", ">"), ("", "</parameter>"), "</function>", "</seed:tool_call>"
)
_GLM_TAGS = ("", ""), ("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>"), "", "</tool_call>"
_MINIMAX_CALL = TaggedCall(
    ('<invoke name="', '">'),
    ('<parameter name="', '">'),
    ("", "</parameter>"),
    "</invoke>",
    "</minimax:tool_call>",
    several=True,
)

HERMES = ToolFormat("hermes", "<tool_call>", _HERMES_CALL, between="\n")
"""Qwen 2.5 and 3, Hermes, Granite 4."""
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", JsonCall(listed=True))
"""Mistral, up to the third version of its tokenizer."""
MISTRAL_ARGS = ToolFormat("mistral_args", "[TOOL_CALLS]", NamedCall("[ARGS]", "[CALL_ID]"))
"""Mistral, since the eleventh version of its tokenizer; some models write `[CALL_ID]`."""
LLAMA = ToolFormat("llama3_json", "", JsonCall("parameters"), between="; ")
"""Llama 3.1 to 3.3."""
GRANITE = ToolFormat("granite", "<|tool_call|>", JsonCall(listed=True))
"""Granite 3."""
QWEN_CODER = ToolFormat("qwen3_coder", "<tool_call>", _QWEN_CODER_CALL, between="\n")
"""Qwen 3 Coder."""
SEED = ToolFormat("seed_oss", "<seed:tool_call>", _SEED_CALL, between="\n")
"""Seed-OSS."""
GLM = ToolFormat("glm45", "<tool_call>", TaggedCall(*_GLM_TAGS), between="\n")
"""GLM 4.5 and 4.6."""
GLM_DENSE = ToolFormat("glm47", "<tool_call>", TaggedCall(*_GLM_TAGS, line=""))
"""GLM 4.7: the tags of 4.5 without line breaks."""
MINIMAX = ToolFormat("minimax_m2", "<minimax:tool_call>", _MINIMAX_CALL)
"""MiniMax M2."""

FORMATS = {
    tool_format.name: tool_format
    for tool_format in (HERMES, MISTRAL, MISTRAL_ARGS, LLAMA, GRANITE, QWEN_CODER, SEED, GLM, GLM_DENSE, MINIMAX)
}
"""All formats, by name: the name of vLLM's parser if one exists for exactly this format."""


def written(tool_format: ToolFormat, calls: Iterable[tuple[str, Mapping[str, Any]]]) -> str:
    """Return calls, given as (name, arguments), in a model's format."""
    marker, style = tool_format.marker, tool_format.call
    match style:
        case JsonCall(listed=True):
            return f"{marker}[{', '.join(_object(style, *call) for call in calls)}]{style.after}"
        case JsonCall():
            bodies = [f"{style.before}{_object(style, *call)}{style.after}" for call in calls]
        case NamedCall():
            bodies = [f"{name}{style.opening}{_json(arguments)}" for name, arguments in calls]
        case TaggedCall():
            tagged = [_tagged(style, *call) for call in calls]
            groups = [style.line.join(tagged)] if style.several else tagged
            begin = style.line if style.name[0] else ""
            bodies = [f"{begin}{group}{style.line}{style.after}" for group in groups]
    return tool_format.between.join(marker + body for body in bodies)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _object(style: JsonCall, name: str, arguments: Mapping[str, Any]) -> str:
    return _json({"name": name, style.arguments: arguments})


def _tagged(style: TaggedCall, name: str, arguments: Mapping[str, Any]) -> str:
    before = style.key[1] + (style.line if style.value[0] else "") + style.value[0] + style.pad

    def tags() -> Iterable[str]:
        yield style.name[0] + name + style.name[1]
        for key, value in arguments.items():
            text = value if isinstance(value, str) else _json(value)
            yield style.key[0] + key + before + text + style.pad + style.value[1]
        if style.end:
            yield style.end

    return style.line.join(tags())
