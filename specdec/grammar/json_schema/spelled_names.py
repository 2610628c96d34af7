"""Other spellings of the names of properties. llguidance permits \\uXXXX for any character in the name of an additional
property, so that `"\\u0061"` would escape the schema of `a`.

A name that matches a pattern has only one spelling. So the schema of a value with named properties gets a condition:
every further name matches a pattern. Each condition is a definition, written once. Schemas that apply beside others (in
allOf, or by reference) get none, since llguidance cannot combine patterns that overlap. A definition that is used both
as a whole value and beside others becomes two.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from specdec.grammar.grammar import GrammarError
from specdec.grammar.json_schema.rewriter import Rewriter, refused
from specdec.grammar.json_schema.schemas import Schema
from specdec.grammar.json_schema.values import list_of, object_of, pointer_part
from specdec.grammar.patterns import PatternError, UnreadableError, WorkSpentError

ANY_NAME = "^(?s:.*)$"

CONTROL = re.compile(r"[\x00-\x1f\x7f]")
"""Characters that have several spellings even in names that match a pattern."""

ALTERNATIVES = ("anyOf", "oneOf")

MANY_NAMES = 64
"""Number of names in a definition above which each reference to it is charged to the work budget."""


@dataclass(frozen=True)
class Names:
    """The names and patterns of properties in all schemas that apply to one value."""

    properties: frozenset[str] = frozenset()
    required: frozenset[str] = frozenset()
    patterns: frozenset[str] = frozenset()
    ambiguous: frozenset[str] = frozenset()  # properties with a control character
    closed: bool = False  # no further names are allowed

    def __or__(self, other: Names) -> Names:
        if other == NONE:
            return self
        return Names(
            self.properties | other.properties,
            self.required | other.required,
            self.patterns | other.patterns,
            self.ambiguous | other.ambiguous,
            self.closed or other.closed,
        )

    def __bool__(self) -> bool:
        return bool(self.properties or self.patterns)

    @property
    def size(self) -> int:
        return len(self.properties) + len(self.required) + len(self.patterns)


NONE = Names()

ITSELF = Names(frozenset([""]))
"""Stands for the names of a definition within itself: a superfluous condition is harmless, a missing one is not."""


class SpelledNames:
    """Adds the condition to a rewritten schema and its definitions."""

    def __init__(self, rewriter: Rewriter, definitions: Mapping[str, tuple[Schema, str]]) -> None:
        """`definitions`: rewritten schemas with their places, by name."""
        self._count, self._languages = rewriter.count, rewriter.languages
        self._definitions = definitions
        self._new: dict[tuple[str, bool], str] = {}  # new names of definitions, by (old name, of a whole value)
        self._known: dict[str, Names] = {}  # of definitions
        self._others: dict[frozenset[str], str | None] = {}  # results of `_besides`
        self._conditions: dict[tuple[frozenset[str], frozenset[str]], tuple[str, Schema]] = {}
        """Conditions and their names, by patterns and listed properties."""

    def whole(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """Return the schema, with the definitions that it uses."""
        result: dict[str, Any] = self._of_value(schema, "", NONE)
        definitions = dict[str, Schema]()
        while ahead := [made for made in self._new.items() if made[1] not in definitions]:
            for (name, of_value), new in ahead:
                found, place = self._definitions[name]
                definitions[new] = self._of_value(found, place, NONE) if of_value else self._beside(found, place)
        definitions |= self._conditions.values()
        return result | ({"$defs": definitions} if definitions else {})

    def _of_value(self, schema: Schema, place: str, around: Names) -> Schema:
        """Return the schema of a value, with the condition. `around`: names of properties in the schemas beside it."""
        if not isinstance(schema, dict):
            return self._of_value({}, place, around) if schema is True and around else schema
        if schema.keys() == {"$ref"} and around == NONE:
            return {"$ref": self._reference(schema, place, of_value=True)}
        key = next((key for key in ALTERNATIVES if key in schema), None)
        if schema.keys() == {"allOf"} and len(schema["allOf"]) == 1:
            key = "allOf"
        rest = {name: value for name, value in schema.items() if name != key}
        found, around = self._beside(rest, place), around | self._names(rest, place)
        if key is not None:
            found[key] = [self._of_value(part, place, around) for part in schema[key]]
            return {name: found[name] for name in schema}  # llguidance applies keywords in their order
        if condition := self._condition(around, place):
            found["allOf"] = [*list_of(found.get("allOf")), {"$ref": condition}]
        return found

    def _beside(self, schema: Schema, place: str) -> Schema:
        """Return a schema that applies beside others: only the schemas of values in it get the condition."""
        if not isinstance(schema, dict):
            return schema
        found = dict(schema)
        for key, value in schema.items():
            inner = f"{place}/{key}"
            match key:
                case "properties" if isinstance(value, dict):
                    found[key] = {
                        name: self._of_value(part, f"{inner}/{pointer_part(name)}", NONE)
                        for name, part in value.items()
                    }
                case "patternProperties" if isinstance(value, dict):  # rewritten: the source has no such place
                    found[key] = {name: self._of_value(part, inner, NONE) for name, part in value.items()}
                case "additionalProperties" | "items":
                    found[key] = self._of_value(value, inner, NONE)
                case "prefixItems" if isinstance(value, list):
                    found[key] = [self._of_value(item, f"{inner}/{n}", NONE) for n, item in enumerate(value)]
                case "allOf" | "anyOf" | "oneOf":  # some parts are conditions, which the source does not list
                    found[key] = [self._beside(part, place) for part in value]
                case "$ref":
                    found[key] = self._reference(schema, place, of_value=False)
        return found

    def _reference(self, schema: Mapping[str, Any], place: str, *, of_value: bool) -> str:
        """Return a reference to the new definition of a schema's target."""
        name = _target(schema)
        of_value = of_value and bool(self._of_definition(name, place))
        return f"#/$defs/{self._new.setdefault((name, of_value), f'd{len(self._new)}')}"

    def _names(self, schema: Schema, place: str) -> Names:
        """Return the names of a schema, with those of the schemas in it that apply to the same value."""
        if not isinstance(schema, dict) or "object" not in schema.get("type", "object"):
            return NONE
        properties = frozenset(object_of(schema.get("properties")))
        found = Names(
            properties,
            frozenset(list_of(schema.get("required"))),
            frozenset(object_of(schema.get("patternProperties"))),
            frozenset(filter(CONTROL.search, properties)),
            schema.get("additionalProperties") is False,
        )
        for part in list_of(schema.get("allOf")):
            found |= self._names(part, place)
        for key in ALTERNATIVES:
            for part in list_of(schema.get(key)):
                found |= replace(self._names(part, place), closed=False)
        if "$ref" in schema:
            found |= self._of_definition(_target(schema), place)
        return found

    def _of_definition(self, name: str, place: str) -> Names:
        """Return the names of a definition, determined once."""
        if name not in self._known:
            self._known[name] = ITSELF
            self._known[name] = self._names(*self._definitions[name])
        found = self._known[name]
        if found.size > MANY_NAMES:
            self._count(place, found.size // 8)
        return found

    def _condition(self, names: Names, place: str) -> str | None:
        """Return a reference to a schema of objects whose further names match a pattern; None if it is not needed."""
        wrong = names.ambiguous
        if names.closed and wrong:
            wrong = frozenset(name for name in wrong if self._may_match(names.patterns, name, place))
        if wrong:
            why = "it has a control character; set additionalProperties to false"
            why += ", and let no pattern match it" if names.patterns else ""
            told = json.dumps(min(wrong))[:80]
            raise GrammarError(f"{place or '/'}: the property {told} cannot be enforced beside others: {why}")
        if not names or names.closed:
            return None
        if names.patterns not in self._others:
            self._others[names.patterns] = self._besides(names.patterns, place)
        others = self._others[names.patterns]
        listed = frozenset[str]() if others else names.properties | names.required  # else other names are excluded
        key = (names.patterns, listed)
        if key not in self._conditions:
            self._count(place, len(listed) + len(names.patterns))
            patterns = [*sorted(names.patterns), *([others] if others else [])]
            self._conditions[key] = (
                f"c{len(self._conditions)}",
                {
                    **({} if others else {"properties": dict.fromkeys(sorted(listed), True)}),
                    "patternProperties": dict.fromkeys(patterns, True),
                    "additionalProperties": False,
                },
            )
        return f"#/$defs/{self._conditions[key][0]}"

    def _besides(self, patterns: frozenset[str], place: str) -> str | None:
        """Return an expression for the names that match none of these; None if it would be too large or if one of these
        cannot be parsed."""
        if not patterns:
            return ANY_NAME
        languages = self._languages
        try:
            return languages.pattern(languages.complement(languages.union(map(languages.of_key, sorted(patterns)))))
        except WorkSpentError as error:
            raise refused(place, "patternProperties", f"it {error}") from None
        except (PatternError, UnreadableError):
            return None

    def _may_match(self, patterns: Iterable[str], name: str, place: str) -> bool:
        """Return False if a name certainly matches none of these patterns."""
        languages = self._languages
        try:
            return any(languages.has(languages.of_key(pattern), name) for pattern in patterns)
        except WorkSpentError as error:
            raise refused(place, "patternProperties", f"it {error}") from None
        except (PatternError, UnreadableError):
            return True


def _target(schema: Mapping[str, Any]) -> str:
    """Return the name of the definition that a rewritten schema refers to."""
    return str(schema["$ref"]).removeprefix("#/$defs/")
