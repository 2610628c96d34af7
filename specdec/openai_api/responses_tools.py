"""Tools of the Responses API as functions of a chat: functions, custom tools, and namespaces of both."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdec.openai_api.errors import ApiError, refused, unsupported, wrong
from specdec.openai_api.json_text import Json
from specdec.wire.tool_formats import MAX_TOOLS

CUSTOM_INPUT = "input"
"""The single argument of a custom tool's function: its input as text."""

JOINT = "__"
"""Separates the namespace from the tool's name in the name of a function."""

MAX_DESCRIPTIONS = 1 << 20
"""Maximum characters of a namespace's description, times the number of its tools: each tool gets a copy."""

WEB_SEARCH = "web_search"
"""Prefix of the types of OpenAI's web search."""

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_KNOWN = {
    "function": ("type", "name", "description", "parameters", "strict"),
    "custom": ("type", "name", "description", "format"),
    "namespace": ("type", "name", "description", "tools"),
}
"""Fields that are read, by tool type."""


@dataclass(frozen=True)
class OfferedTool:
    """A tool that the caller runs."""

    function: Json  # as in a chat
    name: str  # the caller's
    place: str  # in the request
    namespace: str = ""  # the caller's; "" for none
    custom: bool = False  # its input is text

    @property
    def function_name(self) -> str:
        """The tool's name for the model."""
        return str(function_name(self.name, self.namespace))


def function_name(name: Any, namespace: Any) -> Any:
    """Return the name of a tool for the model. Values of the wrong type are refused later, with the rest of the
    chat."""
    return f"{namespace}{JOINT}{name}" if namespace and isinstance(name, str) else name


def offered(given: object, choice: object, ignored: list[str]) -> list[OfferedTool]:
    """Return the tools that the caller runs. An optional web search is left out, and its place appended to `ignored`;
    other tools that OpenAI runs are refused."""
    if not isinstance(given, list):
        raise wrong("tools", given, "a list")
    found, searches = list[OfferedTool](), list[tuple[str, str]]()
    for index, tool in enumerate(given):
        place = f"tools[{index}]"
        kind = _kind(tool, place)
        if kind.startswith(WEB_SEARCH):
            searches.append((place, kind))
        elif kind == "namespace":
            found += _of_namespace(tool, place)
        else:
            found.append(_of_caller(tool, place))
        if len(found) > MAX_TOOLS:
            raise refused("tools", f"has more than {MAX_TOOLS} tools, those of namespaces included")
    for place, kind in searches:
        if not found or choice not in (None, "auto", "none"):
            raise _unknown_kind(place, kind)
        ignored.append(place)
    return found


def chosen(given: object, tools: Sequence[OfferedTool]) -> object:
    """Return the tool choice of a chat."""
    if not isinstance(given, dict):
        if given is not None and not isinstance(given, str):
            raise wrong("tool_choice", given, "text or an object")
        return given
    if given.get("type") not in ("function", "custom"):
        raise unsupported("tool_choice.type", f"{given.get('type')!r} is not supported")
    name = given.get("name")
    named = [tool for tool in tools if tool.name == name]
    if len(named) == 1:  # it may be in a namespace, which a choice cannot name
        name = named[0].function_name
    return {"type": "function", "function": {"name": name}}


def places_of(tools: Sequence[OfferedTool]) -> Mapping[str, str]:
    """Return the names of a chat's tools in errors, mapped to their places in the request."""
    return {f"tools[{index}]{part}": tool.place for index, tool in enumerate(tools) for part in ("", ".function")}


def _kind(tool: object, place: str) -> str:
    """Return the type of a tool; "" if it is missing."""
    if not isinstance(tool, dict):
        raise wrong(place, tool, "an object")
    kind = tool.get("type")
    return kind if isinstance(kind, str) else "" if kind is None else repr(kind)


def _unknown_kind(place: str, kind: str) -> ApiError:
    given = f"{kind!r} is not supported" if kind else "is missing"
    return unsupported(f"{place}.type", f"{given}, must be function, custom or namespace")


def _of_namespace(tool: Json, place: str) -> Iterator[OfferedTool]:
    """Yield the tools of a namespace; each description combines the namespace's and its own."""
    _check_fields(tool, place, "namespace")
    namespace, words, inner = tool.get("name"), tool.get("description") or "", tool.get("tools")
    if not isinstance(namespace, str) or not namespace:
        raise wrong(f"{place}.name", namespace, "text that is not empty")
    if not isinstance(words, str):
        raise wrong(f"{place}.description", words, "text")
    if not isinstance(inner, list):
        raise wrong(f"{place}.tools", inner, "a list")
    if len(words) * len(inner) > MAX_DESCRIPTIONS:
        most = MAX_DESCRIPTIONS // len(inner)
        raise refused(
            f"{place}.description",
            f"has {len(words)} characters, must have at most {most} before each of {len(inner)} tools",
        )
    for index, member in enumerate(inner):
        where = f"{place}.tools[{index}]"
        made = _of_caller(member, where, namespace)
        if not isinstance(made.name, str) or not _NAME.fullmatch(made.function_name):
            problem = (
                f"becomes {str(made.function_name)[:80]!r} with its namespace, must be at most 64 letters, digits, "
            )
            raise refused(f"{where}.name", f"{problem}underscores and hyphens")
        own = made.function.get("description")
        described = "\n\n".join(text for text in (words, own) if isinstance(text, str) and text)
        made.function.update(name=made.function_name, **({"description": described} if described else {}))
        yield made


def _of_caller(tool: Any, place: str, namespace: str = "") -> OfferedTool:
    """Return a function or a custom tool."""
    kind = _kind(tool, place)
    if kind not in ("function", "custom"):
        raise _unknown_kind(place, kind)
    _check_fields(tool, place, kind)
    function = {name: tool[name] for name in ("name", "description", "parameters", "strict") if name in tool}
    if kind == "custom":
        if (tool.get("format") or {"type": "text"}) != {"type": "text"}:
            raise unsupported(f"{place}.format", "is not supported unless it is text")
        function["parameters"] = {
            "type": "object",
            "properties": {CUSTOM_INPUT: {"type": "string"}},
            "required": [CUSTOM_INPUT],
            "additionalProperties": False,
        }
    return OfferedTool(function, tool.get("name"), place, namespace, custom=kind == "custom")


def _check_fields(tool: Json, place: str, kind: str) -> None:
    for field, value in tool.items():
        if field not in _KNOWN[kind] and value not in (None, False, [], ["direct"]):
            raise unsupported(f"{place}.{field}")
