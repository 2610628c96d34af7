"""Names of additional properties, which llguidance lets spell any character as \\uXXXX: `"\\u0061"` would escape what a
schema says about `a`.

A name that matches a pattern has only one spelling. So the schema of a value with named properties gets a condition:
every further name matches a pattern. Schemas that apply beside others (in allOf, or by reference) get none, since
llguidance cannot combine patterns that overlap. A definition that is used in both ways becomes two.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from specdec.grammar.grammar import GrammarError
from specdec.grammar.json_schema.rewriter import Rewriter
from specdec.grammar.json_schema.schemas import Schema
from specdec.grammar.json_schema.values import list_of, object_of
from specdec.grammar.patterns import PatternError, UnreadableError

ANY_NAME = "^(?s:.*)$"

CONTROL = re.compile(r"[\x00-\x1f\x7f]")
"""Characters that have several spellings even in names that match a pattern."""

ALTERNATIVES = ("anyOf", "oneOf")


@dataclass(frozen=True)
class Names:
    """What the schemas that apply to one value say about the names of its properties."""

    properties: frozenset[str] = frozenset()
    required: frozenset[str] = frozenset()
    patterns: frozenset[str] = frozenset()
    closed: bool = False  # no further names are allowed

    def __or__(self, other: Names) -> Names:
        return Names(
            self.properties | other.properties,
            self.required | other.required,
            self.patterns | other.patterns,
            self.closed or other.closed,
        )

    def __bool__(self) -> bool:
        return bool(self.properties or self.patterns)


NONE = Names()


class SpelledNames:
    """Adds the condition to a rewritten schema and its definitions."""

    def __init__(self, rewriter: Rewriter, definitions: Mapping[str, Schema]) -> None:
        self._count, self._languages = rewriter.count, rewriter.languages
        self._definitions = definitions
        self._new: dict[tuple[str, bool], str] = {}  # new names of definitions: old name, whether of a whole value
        self._named: dict[str, bool] = {}  # whether a definition says anything about names

    def whole(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """Return the schema, with the definitions that it uses."""
        result: dict[str, Any] = self._of_value(schema, NONE)
        definitions = dict[str, Schema]()
        while ahead := [made for made in self._new.items() if made[1] not in definitions]:
            for (name, of_value), new in ahead:
                found = self._definitions[name]
                definitions[new] = self._of_value(found, NONE) if of_value else self._beside(found)
        return result | ({"$defs": definitions} if definitions else {})

    def _of_value(self, schema: Schema, around: Names) -> Schema:
        """Return the schema of a value. `around`: names of schemas that apply beside it."""
        if not isinstance(schema, dict):
            return self._of_value({}, around) if schema is True and around else schema
        if schema.keys() == {"$ref"} and around == NONE:
            return {"$ref": self._reference(schema, of_value=True)}
        key = next((key for key in ALTERNATIVES if key in schema), None)
        if schema.keys() == {"allOf"} and len(schema["allOf"]) == 1:
            key = "allOf"
        rest = {name: value for name, value in schema.items() if name != key}
        found, around = self._beside(rest), around | self._names(rest, set())
        if key is not None:
            found[key] = [self._of_value(part, around) for part in schema[key]]
            return {name: found[name] for name in schema}  # llguidance applies keywords in their order
        if condition := self._condition(around):
            found["allOf"] = [*list_of(found.get("allOf")), condition]
        return found

    def _beside(self, schema: Schema) -> Schema:
        """Return a schema that applies beside others."""
        if not isinstance(schema, dict):
            return schema
        found = dict(schema)
        for key, value in schema.items():
            match key:
                case "properties" | "patternProperties" if isinstance(value, dict):
                    found[key] = {name: self._of_value(inner, NONE) for name, inner in value.items()}
                case "additionalProperties" | "items":
                    found[key] = self._of_value(value, NONE)
                case "prefixItems" if isinstance(value, list):
                    found[key] = [self._of_value(item, NONE) for item in value]
                case "allOf" | "anyOf" | "oneOf":
                    found[key] = [self._beside(part) for part in value]
                case "$ref":
                    found[key] = self._reference(schema, of_value=False)
        return found

    def _reference(self, schema: Mapping[str, Any], *, of_value: bool) -> str:
        """Return a reference to the new definition of a schema's target."""
        name = _target(schema)
        if name not in self._named:
            self._named[name] = bool(self._names(schema, set()))
        new = self._new.setdefault((name, of_value and self._named[name]), f"d{len(self._new)}")
        return f"#/$defs/{new}"

    def _names(self, schema: Schema, seen: set[str]) -> Names:
        """Return the names of a schema, with those of the schemas in it that apply to the same value."""
        self._count("")
        if not isinstance(schema, dict) or "object" not in schema.get("type", "object"):
            return NONE
        found = Names(
            frozenset(object_of(schema.get("properties"))),
            frozenset(list_of(schema.get("required"))),
            frozenset(object_of(schema.get("patternProperties"))),
            schema.get("additionalProperties") is False,
        )
        for part in list_of(schema.get("allOf")):
            found |= self._names(part, seen)
        for key in ALTERNATIVES:
            for part in list_of(schema.get(key)):
                found |= replace(self._names(part, seen), closed=False)
        if "$ref" in schema and (name := _target(schema)) not in seen:
            seen.add(name)
            found |= self._names(self._definitions[name], seen)
        return found

    def _condition(self, names: Names) -> Schema:
        """Return a schema of objects whose further names match a pattern; None if it is not needed."""
        if not names or (names.closed and not names.patterns):
            return None
        if wrong := [name for name in names.properties if CONTROL.search(name)]:
            why = "it has a control character; set additionalProperties to false"
            raise GrammarError(f"the property {json.dumps(min(wrong))[:80]} cannot be enforced beside others: {why}")
        if names.closed:
            return None
        patterns = sorted(names.patterns)
        if not patterns:
            return {"patternProperties": {ANY_NAME: True}, "additionalProperties": False}
        allowed = dict.fromkeys(patterns, True)
        try:
            known = self._languages.union(map(self._languages.of_key, patterns))
            others = self._languages.pattern(self._languages.complement(known))
        except (PatternError, UnreadableError):  # then other names are not written
            listed = dict.fromkeys(sorted(names.properties | names.required), True)
            return {"properties": listed, "patternProperties": allowed, "additionalProperties": False}
        return {"patternProperties": {**allowed, others: True}, "additionalProperties": False}


def _target(schema: Mapping[str, Any]) -> str:
    """Return the name of the definition that a rewritten schema refers to."""
    return str(schema["$ref"]).removeprefix("#/$defs/")
