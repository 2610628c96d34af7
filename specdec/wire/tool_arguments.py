"""Tool-call arguments that are plain text between tags, converted by their function's schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

MAX_REFERENCES, MAX_REFERENCE_CHARACTERS = 32, 1000
"""Maximum references followed from one schema, since it may refer to itself, and maximum length of each."""

MAX_ALTERNATIVES = 64
"""Maximum alternative schemas of one value, including nested ones; with more, its types count as unknown."""

MAX_LISTED = 10_000
"""Maximum values listed for one value, over all its alternatives: they are read for each argument of a call."""

_PYTHON_WORDS = {"True": True, "False": False, "None": None}
"""Values in Python's syntax: some templates write them, and models imitate those."""

_TYPES = {
    str: "string",
    bool: "boolean",
    type(None): "null",
    int: "number",
    float: "number",
    dict: "object",
    list: "array",
}


def property_schemas(schema: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the schemas of the permitted arguments, by name; an invalid schema allows anything."""
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return {}
    allowed = {name: inner for name, inner in properties.items() if inner is not False}
    return {name: inner if isinstance(inner, dict) else {} for name, inner in allowed.items()}


def resolved(schema: object, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema whose top-level reference is resolved; an unresolvable one allows anything."""
    for _ in range(MAX_REFERENCES):
        if not isinstance(schema, dict):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        if len(reference) > MAX_REFERENCE_CHARACTERS:
            return {}
        schema = root if reference.startswith("#") else None
        for part in reference[1:].split("/")[1:]:
            schema = schema.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(schema, dict) else None
    return {}


def types_of(schema: object, root: Mapping[str, Any]) -> frozenset[str]:
    """Return the JSON types that a schema allows; empty if it names none, or lists too many values."""
    types: set[str] = set()
    waiting, left = [schema], MAX_LISTED
    for _ in range(MAX_ALTERNATIVES):
        if not waiting:
            break
        found = resolved(waiting.pop(), root)
        named = found.get("type")
        left -= sum(len(listed) for key in ("enum", "type") if isinstance(listed := found.get(key), list))
        if left < 0:
            return frozenset()
        choices: list[object] = next((found[key] for key in ("anyOf", "oneOf") if isinstance(found.get(key), list)), [])
        if isinstance(named, str | list):
            types.update([named] if isinstance(named, str) else (name for name in named if isinstance(name, str)))
        elif "const" in found or isinstance(found.get("enum"), list):
            values = [found["const"]] if "const" in found else found["enum"]
            types.update(_TYPES.get(type(value), "string") for value in values)
        elif 0 < len(choices) <= MAX_ALTERNATIVES:
            waiting += choices
        else:
            return frozenset()
    return frozenset() if waiting else frozenset(types)


def is_text(types: frozenset[str]) -> bool:
    """Return True if a value of these types is written verbatim rather than as JSON."""
    return "string" in types and types <= {"string", "null"}


def value_of(text: str, schema: object, root: Mapping[str, Any]) -> object:
    """Return the value of an argument from a model's text; text that is not JSON is a string."""
    types = types_of(schema, root)
    if is_text(types):
        return None if "null" in types and text in ("null", "None") else text
    if (word := text.strip()) in _PYTHON_WORDS:
        return _PYTHON_WORDS[word]
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return text


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
