"""Random JSON schemas of the kinds used by applications."""

from __future__ import annotations

import random
from typing import Any

WORDS = (
    "name", "title", "kind", "state", "size", "count", "items", "value", "path", "line", "unit", "owner", "active",
    "created", "message", "level", "score", "tags", "parent", "children", "reason", "amount", "currency", "city",
)  # fmt: skip


def random_schema(chance: random.Random, depth: int = 3) -> dict[str, Any]:
    """Return an object's schema nested at most `depth` levels."""
    names = chance.sample(WORDS, chance.randint(1, 5))
    required = [name for name in names if chance.random() < 0.7]
    return {
        "type": "object",
        "properties": {name: _value(chance, depth - 1) for name in names},
        "required": required or names[:1],
        "additionalProperties": False,
    }


def _value(chance: random.Random, depth: int) -> dict[str, Any]:
    kinds = [_text, _integer, _number, _boolean, _enum, _pattern]
    if depth > 0:
        kinds += [_array, _object, _either]
    return chance.choice(kinds)(chance, depth)


def _text(chance: random.Random, _: int) -> dict[str, Any]:
    return {"type": "string", "maxLength": chance.randint(1, 16)}


def _integer(chance: random.Random, _: int) -> dict[str, Any]:
    least = chance.randint(-100, 100)
    return {"type": "integer", "minimum": least, "maximum": least + chance.randint(0, 1000)}


def _number(chance: random.Random, _: int) -> dict[str, Any]:
    return {"type": "number", "minimum": 0, "maximum": chance.randint(1, 100)}


def _boolean(_: random.Random, __: int) -> dict[str, Any]:
    return {"type": "boolean"}


def _enum(chance: random.Random, _: int) -> dict[str, Any]:
    return {"enum": chance.sample([*WORDS[:12], 1, 2.5, None, True], chance.randint(1, 5))}


def _pattern(chance: random.Random, _: int) -> dict[str, Any]:
    return {"type": "string", "pattern": chance.choice(["^[0-9]{4}-[0-9]{2}$", "^[a-z]+(_[a-z]+)*$", "^#[0-9a-f]{6}$"])}


def _array(chance: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "array", "items": _value(chance, depth - 1), "maxItems": chance.randint(1, 4)}


def _object(chance: random.Random, depth: int) -> dict[str, Any]:
    return random_schema(chance, depth)


def _either(chance: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_value(chance, depth - 1), {"type": "null"}]}
