"""Grammars nested to any depth, one shape per feature of a grammar language."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from specdec.grammar.grammar import Grammar, Kind


def _lark(*rules: str) -> Grammar:
    return Grammar(Kind.LARK, ("\n".join(rules),))


def _schema(source: str) -> Grammar:
    return Grammar(Kind.JSON_SCHEMA, (source,))


def _chain(depth: int, rule: str = "{below}", name: str = "a") -> Grammar:
    rules = (f"{name}{at}: " + rule.format(below=f"{name}{at + 1}") for at in range(depth))
    return _lark(f"start: {name}0", *rules, f'{name}{depth}: "x"')


def _references(depth: int, definition: Callable[[dict[str, Any]], Any]) -> Grammar:
    definitions = {f"d{at}": definition({"$ref": f"#/$defs/d{at + 1}"}) for at in range(depth)}
    return _schema(json.dumps({"$defs": definitions | {f"d{depth}": {"type": "null"}}, "$ref": "#/$defs/d0"}))


def _around(before: str, middle: str, after: str) -> Callable[[int], str]:
    return lambda depth: before * depth + middle + after * depth


_ARRAYS = _around('{"type": "array", "items": ', '{"type": "null"}', "}")
_OBJECTS = _around('{"type": "object", "required": ["a"], "properties": {"a": ', '{"type": "null"}', "}}")
_CHOICES = _around('{"anyOf": [', '{"type": "null"}', "]}")
_GROUPS = _around("(", "x", "y)?")

SHAPES: dict[str, Callable[[int], Grammar]] = {
    "rules": _chain,
    "rules backwards": lambda depth: _lark(*reversed(_chain(depth).source[0].splitlines())),
    "rules with more": lambda depth: _chain(depth, '"y" {below} | "z"'),
    "terminals": lambda depth: _chain(depth, "{below}", "A"),
    "groups": lambda depth: _lark("start: " + _around("(", '"x"', ")?")(depth)),
    "expression": lambda depth: Grammar(Kind.REGEX, (_GROUPS(depth),)),
    "expression in Lark": lambda depth: _lark(f"start: /{_GROUPS(depth)}/"),
    "pattern": lambda depth: _schema(json.dumps({"type": "string", "pattern": _GROUPS(depth)})),
    "arrays": lambda depth: _schema(_ARRAYS(depth)),
    "objects": lambda depth: _schema(_OBJECTS(depth)),
    "choices": lambda depth: _schema(_CHOICES(depth)),
    "constant": lambda depth: _schema('{"const": ' + _around("[", "", "]")(depth) + "}"),
    "schema in Lark": lambda depth: _lark(f"start: %json {_OBJECTS(depth)}"),
    "references": lambda depth: _references(depth, lambda below: below),
    "objects by reference": lambda depth: _references(
        depth, lambda below: {"type": "object", "required": ["a"], "properties": {"a": below}}
    ),
    "arrays by reference": lambda depth: _references(
        depth, lambda below: {"type": "array", "minItems": 1, "items": below}
    ),
    "choices by reference": lambda depth: _references(depth, lambda below: {"anyOf": [{"type": "string"}, below]}),
    "all of by reference": lambda depth: _references(depth, lambda below: {"allOf": [{"title": "a"}, below]}),
    "properties": lambda depth: _schema(
        json.dumps({"properties": {f"p{n}": {"pattern": f"^[a-z]{{{n % 40}}}$"} for n in range(min(depth, 600))}})
    ),
    "long choice": lambda depth: Grammar(Kind.CHOICE, tuple(f"text {n}" for n in range(min(depth, 1024)))),
}


def nested(shape: str, depth: int) -> Grammar:
    """Return a grammar of this shape with `depth` levels."""
    return SHAPES[shape](depth)
