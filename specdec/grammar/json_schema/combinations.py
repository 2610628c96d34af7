"""Schemas composed of others: `allOf`, `anyOf`, `oneOf`, `$ref`, `not`, and `if` with `then` and `else`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from specdec.grammar.json_schema.negation import negation
from specdec.grammar.json_schema.one_of import distinguishing
from specdec.grammar.json_schema.rewriter import Rewrite, Rewriter
from specdec.grammar.json_schema.schemas import Schema, alternatives, any_of, both
from specdec.grammar.json_schema.values import list_of, object_of

IF_ALONE = frozenset(["if", "then", "else"])
"""Keywords of a part of allOf that is only a condition."""


def rewrite_combinations(rewriter: Rewriter, part: Rewrite) -> None:
    source, place = part.source, part.place
    cases, grouped = _cases(rewriter, source, place)
    part.conditions.extend(cases)
    for key in ("allOf", "anyOf"):
        if isinstance(parts := source.get(key), list):
            inner = [(n, schema) for n, schema in enumerate(parts) if id(schema) not in grouped]
            if inner or not parts:
                part.keywords[key] = [rewriter.schema(schema, f"{place}/{key}/{n}") for n, schema in inner]
        elif key in source:
            part.keywords[key] = parts
    if "oneOf" in source:
        _rewrite_one_of(rewriter, part)
    if "$ref" in source:
        part.keywords["$ref"] = rewriter.reference(source, f"{place}/$ref")
    if "not" in source:
        part.conditions.append(negation(rewriter, source["not"], f"{place}/not"))
    if "if" in source and ("then" in source or "else" in source) and id(source) not in grouped:
        part.conditions.append(_conditional(rewriter, source, place))


def _rewrite_one_of(rewriter: Rewriter, part: Rewrite) -> None:
    """Rewrite `oneOf` as the union of its parts, which must share no value. A property that alone distinguishes them
    becomes required. Where this cannot be seen here, llguidance compares the parts; it follows no references."""
    parts, place = list_of(part.source["oneOf"]), f"{part.place}/oneOf"
    ways = [rewriter.schema(way, f"{place}/{n}") for n, way in enumerate(parts)]
    name = distinguishing(rewriter, parts, place, part.source)
    if name is None and rewriter.guidance.get("coerce_one_of") is not True:
        part.keywords["oneOf"] = ways
        return
    found = any_of([both(way, {"required": [name]}) for way in ways] if name else ways)
    if isinstance(found, bool) or "anyOf" in part.keywords:
        part.conditions.append(found)
    else:
        part.keywords["anyOf"] = alternatives(found)


def _conditional(rewriter: Rewriter, schema: Mapping[str, Any], place: str) -> Schema:
    """Return if, then and else as mutually exclusive alternatives."""
    asked, inner = schema["if"], f"{place}/if"
    held, broken = rewriter.schema(asked, inner), negation(rewriter, asked, inner)
    if "then" in schema:
        held = both(held, rewriter.schema(schema["then"], f"{place}/then"))
    if "else" in schema:
        broken = both(broken, rewriter.schema(schema["else"], f"{place}/else"))
    return any_of([held, broken])


def _cases(rewriter: Rewriter, schema: Mapping[str, Any], place: str) -> tuple[list[Schema], set[int]]:
    """Merge the ifs that test the same property: return one condition per property, with a case per value, and the
    identities of the schemas with these ifs. Rewritten one by one, the ifs would make too many combinations."""
    groups: dict[str, list[tuple[list[Any], Mapping[str, Any], str]]] = {}
    if schema.get("type") == "object":
        parts = [(object_of(part), f"{place}/allOf/{n}") for n, part in enumerate(list_of(schema.get("allOf")))]
        for part, at in ((schema, place), *(part for part in parts if part[0].keys() <= IF_ALONE)):
            if "if" in part and (found := _asked_value(part["if"], schema.get("required"))) is not None:
                groups.setdefault(found[0], []).append((found[1], part, at))
    conditions, grouped = list[Schema](), set[int]()
    for name, members in groups.items():
        if len(members) == 1:
            continue
        grouped |= {id(part) for _, part, _ in members}
        values = list({json.dumps(value): value for asked, *_ in members for value in asked}.values())
        inner = [
            {key: rewriter.schema(part[key], f"{at}/{key}") for key in ("then", "else") if key in part}
            for _, part, at in members
        ]
        rewriter.count(place, 8 * len(values) * len(members))
        cases: list[Schema] = []
        for value in values:
            case: Schema = {"properties": {name: {"const": value}}, "required": [name]}
            for (asked, *_), then in zip(members, inner, strict=True):
                case = both(case, then.get("then" if value in asked else "else", True))
            cases.append(case)
        other = negation(rewriter, {"properties": {name: {"enum": values}}, "required": [name]}, f"{place}/if")
        for then in inner:
            other = both(other, then.get("else", True))
        conditions.append(any_of([*cases, other]))
    return conditions, grouped


def _asked_value(asked: Any, required: Any) -> tuple[str, list[Any]] | None:
    """Return the property that an `if` tests, and the values that it tests for; None if it tests anything else, too.
    `required`: properties that every tested object has."""
    if not isinstance(asked, dict) or not asked.keys() <= {"properties", "required", "type"}:
        return None
    properties = object_of(asked.get("properties"))
    if len(properties) != 1 or asked.get("type", "object") != "object":
        return None
    ((name, inner),) = properties.items()
    needed = list_of(asked.get("required"))
    if not set(map(str, needed)) <= {name} or name not in (*needed, *list_of(required)):
        return None
    if not isinstance(inner, dict) or inner.keys() - {"type"} not in ({"const"}, {"enum"}):
        return None
    values = [inner["const"]] if "const" in inner else list_of(inner["enum"])
    return (name, values) if all(isinstance(value, str) for value in values) else None
