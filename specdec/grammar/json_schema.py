"""JSON schemas as real generators write them, rewritten into the keywords that llguidance takes.

The rewritten schema is valid for the same values, with three exceptions: bounds that no 64-bit float equals are
narrowed, a property that tells the parts of a oneOf apart is always written, and an item that fits `contains` is among
the first ones of its array. What has no equivalent is refused with its place
in the schema, a JSON pointer. Annotations are dropped, and so are keywords that JSON Schema does not have, and formats
that llguidance does not know (annotations too: JSON Schema 2020-12, 7.2.1).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise, permutations
from typing import Any, TypeVar

from specdec.grammar.grammar import MAX_SOURCE_BYTES, GrammarError, Kind, source_violation
from specdec.grammar.json_values import (
    BOUNDS,
    LARGEST,
    are_objects,
    are_texts,
    bound,
    inexact,
    is_at_most,
    is_exact,
    is_number,
    is_one_of,
    list_of,
    object_of,
    pointer_part,
)
from specdec.grammar.languages import Languages
from specdec.grammar.patterns import EVERY, PatternError, PatternTooLargeError, UnreadableError
from specdec.grammar.references import Document
from specdec.grammar.unique_items import UniqueItems

Made = TypeVar("Made")

Schema = Any
"""A schema: an object, or true or false."""

MAX_SCHEMAS = 20_000
"""Most schemas visited within one: some 100 ms."""

MAX_COMBINATIONS = 32
"""Most alternatives that the conditions of one object may make together: llguidance follows them side by side."""

MAX_CONTAINING = 16
"""Number of first items of an array of which one must fit `contains`: an alternative for each place."""

MAX_UNIQUE = 4
"""Most values of items that must be unique: an alternative for each order."""

MAX_NEGATIONS = 50
"""Most levels of a schema that is negated."""

MAX_TOLD_CHARACTERS = 320
"""Most characters of a problem: its place may be deep."""

LIBRARY_FORMATS = frozenset(
    ["date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"]
)
"""Formats of strings that llguidance enforces."""

FORMAT_PATTERNS = {
    "json-pointer": "^(?:/(?:[^~/]|~[01])*)*$",
    "relative-json-pointer": "^(?:0|[1-9][0-9]*)(?:#|(?:/(?:[^~/]|~[01])*)*)$",
} | {
    f"uuid{version}": f"^[0-9a-fA-F]{{8}}-[0-9a-fA-F]{{4}}-{version}[0-9a-fA-F]{{3}}"
    "-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12}$"
    for version in range(1, 9)
}
"""Further formats, as expressions: JSON Schema's own, and pydantic's."""

COPIED = frozenset(["maxLength", "maxProperties", "minLength", "minProperties", "multipleOf", "required", "type"])
"""Keywords that llguidance enforces, with values that hold no schema."""

OTHER_TYPES = ("null", "boolean", "string", "array", "object")
"""All types but numbers."""


def supported_source(source: str, *, checks: bool = False) -> tuple[str, UniqueItems | None]:
    """Return the JSON of an equivalent schema that llguidance takes; GrammarError if there is none. With `checks`, also
    one that allows more, and the check that a finished text needs. A source that is not a JSON object is returned as it
    is: compilation will say why."""
    if problem := source_violation(Kind.JSON_SCHEMA, (source,)):
        raise GrammarError(problem)
    try:
        schema = json.loads(source)
    except (ValueError, RecursionError):
        return source, None
    if not isinstance(schema, dict):
        return source, None
    found, check = _rewritten(schema, Work(), checks=checks)
    return json_text(found), check


def json_text(schema: Mapping[str, Any]) -> str:
    """Return the JSON of a schema; GrammarError if it is too long. Half a character, which UTF-8 does not have, stays
    escaped."""
    for ascii_alone in (False, True):
        found, size = list[str](), 0
        try:
            for piece in json.JSONEncoder(ensure_ascii=ascii_alone).iterencode(schema):
                found.append(piece)
                size += len(piece.encode())
                if size > MAX_SOURCE_BYTES:
                    raise GrammarError(f"takes more than {MAX_SOURCE_BYTES} bytes with its conditions written out")
        except UnicodeEncodeError:
            continue
        except RecursionError:
            break
        return "".join(found)
    raise GrammarError("nests too deep")


class Work:
    """The budget of work for the schemas of one request."""

    def __init__(self) -> None:
        self.left = MAX_SCHEMAS
        self.languages = Languages()


def supported(schema: Mapping[str, Any], work: Work | None = None) -> Mapping[str, Any]:
    """Return an equivalent schema that llguidance takes; GrammarError if there is none. With llguidance's `lenient` the
    schema itself, since what cannot be enforced is to be ignored."""
    found, _ = _rewritten(schema, work or Work(), checks=False)
    return found


def _rewritten(schema: Mapping[str, Any], work: Work, *, checks: bool) -> tuple[Mapping[str, Any], UniqueItems | None]:
    """Return what `supported` returns; with `checks`, also the check of what the schema leaves out, if anything."""
    if object_of(schema.get("x-guidance")).get("lenient") is True:
        return schema, None
    try:
        rewriting = _Rewriting(schema, work, checks=checks)
        return rewriting.whole(), rewriting.check()
    except GrammarError as error:
        told = str(error)
        if len(told) <= MAX_TOLD_CHARACTERS:
            raise
        half = MAX_TOLD_CHARACTERS // 2
        raise GrammarError(f"{told[:half]} ... {told[-half:]}") from None
    except RecursionError:
        raise GrammarError("nests too deep") from None
    except PatternError as error:  # the work of a whole request is done
        raise GrammarError(f"cannot be enforced: an expression {error}") from None


class _Rewriting:
    """Rewrites one schema. Every method gets the place of its schema as a JSON pointer, for errors."""

    def __init__(self, root: Mapping[str, Any], work: Work, *, checks: bool) -> None:
        self._root = root
        self._work = work
        self._checks = checks
        self._unenforced: dict[int, str] = {}  # places of schemas whose uniqueItems is left out, by identity
        self._document = Document(root)
        self._languages = work.languages
        self._negations = 0
        self._names: dict[int, str] = {}  # of the definitions in the result, by the identity of their schema
        self._pending: list[tuple[str, Schema, str]] = []  # definitions that are yet to be rewritten

    def whole(self) -> dict[str, Any]:
        found = self.schema(self._root, "")
        if found is False:
            raise GrammarError("matches no text")
        result: dict[str, Any] = {} if found is True else found
        definitions = {}
        while self._pending:
            name, target, place = self._pending.pop()
            definitions[name] = self.schema(target, place)
        result |= {"$defs": definitions} if definitions else {}
        return result | {key: self._root[key] for key in ("x-guidance",) if key in self._root}

    def check(self) -> UniqueItems | None:
        """Return the check of what the result leaves out; None if nothing."""
        return UniqueItems(self._root, self._document, self._unenforced) if self._unenforced else None

    def schema(self, schema: Schema, place: str) -> Schema:
        """Return an equivalent schema."""
        self._count(place, len(schema) if isinstance(schema, dict) else 0)
        if not isinstance(schema, dict):
            if isinstance(schema, bool):
                return schema
            raise GrammarError(f"{place or '/'}: must be an object, true or false")
        found: dict[str, Any] = {key: schema[key] for key in COPIED if key in schema}
        conditions: list[Schema] = []  # schemas that must hold as well
        self._values(schema, place, found)
        self._numbers(schema, place, found)
        self._string(schema, place, found, conditions)
        self._array(schema, place, found, conditions)
        self._object(schema, place, found, conditions)
        self._combined(schema, place, found, conditions)
        for key in ("$dynamicRef", "$recursiveRef"):
            if key in schema:
                raise _refused(place, key, "use $ref")
        if False in conditions:
            return False
        if conditions := [condition for condition in conditions if condition is not True]:
            numbers = [number for condition in conditions if (number := len(_alternatives(condition))) > 1]
            combinations = math.prod(numbers)
            if combinations > MAX_COMBINATIONS and len(numbers) > 1:
                raise GrammarError(
                    f"{place or '/'}: has conditions that make more than {MAX_COMBINATIONS} combinations: list the "
                    "allowed objects in anyOf"
                )
            found["allOf"] = [*list_of(found.get("allOf")), *conditions]
        return found

    def _count(self, place: str, size: int = 0) -> None:
        """Charge for one schema, and for a list or a text of this size in it."""
        self._work.left -= 1 + size // 8
        if self._work.left < 0:
            raise GrammarError(f"{place or '/'}: makes more than {MAX_SCHEMAS} schemas with its conditions written out")

    # Keywords by the type of value they constrain.

    def _values(self, schema: Mapping[str, Any], place: str, found: dict[str, Any]) -> None:
        for key in ("const", "enum"):
            if key in schema:
                rounded, size = inexact(schema[key])
                self._count(place, size)
                for wrong in rounded:
                    raise _refused(place, key, f"{wrong} has more digits than a 64-bit float; write it as a string")
                found[key] = schema[key]

    def _numbers(self, schema: Mapping[str, Any], place: str, found: dict[str, Any]) -> None:
        for key, (_, away) in BOUNDS.items():
            if key not in schema:
                continue
            value = schema[key]
            if isinstance(value, bool) or not isinstance(value, int | float):
                found[key] = value  # draft 4's flag, or wrong
            elif value * away > LARGEST:
                raise _refused(place, key, f"must be between -{LARGEST} and {LARGEST}")
            else:
                found[key] = bound(value, away)
        if schema.get("maximum") == 2**63 - 1 and schema.get("type") == "integer":
            found["maximum"] = 2**63 - 1  # the one bound above LARGEST that is exact

    def _string(self, schema: Mapping[str, Any], place: str, found: dict[str, Any], conditions: list[Schema]) -> None:
        patterns = []
        if is_one_of(name := schema.get("format"), LIBRARY_FORMATS):
            found["format"] = name
        elif is_one_of(name, FORMAT_PATTERNS):
            patterns.append(FORMAT_PATTERNS[name])
        if isinstance(pattern := schema.get("pattern"), str):
            patterns += self._patterns(pattern, place, "pattern")
        elif pattern is not None:
            found["pattern"] = pattern
        if patterns:
            found["pattern"] = patterns[0]
            conditions += [{"pattern": pattern} for pattern in patterns[1:]]

    def _patterns(self, pattern: str, place: str, key: str) -> list[str]:
        """Return expressions that together stand for one."""
        self._count(place, len(pattern))
        try:
            return self._languages.patterns(self._languages.of_pattern(pattern))
        except UnreadableError:
            return [pattern]
        except PatternError as error:
            if _can_stay(pattern, error):
                return [pattern]
            raise _refused(place, key, f"it {error}") from None

    def _key_pattern(self, pattern: str, place: str) -> str:
        """Return one expression for names of properties."""
        self._count(place, len(pattern))
        try:
            return self._languages.pattern(self._languages.of_pattern(pattern))
        except UnreadableError:
            return pattern
        except PatternError as error:
            if _can_stay(pattern, error):
                return pattern
            raise _refused(place, pattern, f"it {error}") from None

    def _array(self, schema: Mapping[str, Any], place: str, found: dict[str, Any], conditions: list[Schema]) -> None:
        prefix, items = schema.get("prefixItems"), schema.get("items")
        if isinstance(items, list):  # before draft 2020-12
            prefix, items = items, schema.get("additionalItems")
        if isinstance(prefix, list):
            found["prefixItems"] = [self.schema(item, f"{place}/prefixItems/{n}") for n, item in enumerate(prefix)]
        elif prefix is not None:
            found["prefixItems"] = prefix
        if items is None and "unevaluatedItems" in schema:
            if set(schema) & {"allOf", "anyOf", "oneOf", "$ref", "if", "contains", "dependentSchemas"}:
                raise _refused(place, "unevaluatedItems", "use items beside prefixItems")
            items = schema["unevaluatedItems"]
        if items is not None:
            found["items"] = self.schema(items, f"{place}/items")
        limits = {key: schema[key] for key in ("minItems", "maxItems") if key in schema}
        found |= limits
        if "contains" in schema:
            self._contains(schema, place, found, conditions)
        if schema.get("uniqueItems") is True and not is_at_most(limits.get("maxItems"), 1):
            values = None if prefix else self._finite(items)
            if values is not None and len(values) <= MAX_UNIQUE:
                self._count(place, math.factorial(len(values)) * 8)
                conditions.append(
                    {
                        "anyOf": [
                            {"prefixItems": [{"const": value} for value in order], "items": False}
                            for order in permutations(values)
                        ]
                    }
                )
            elif self._checks:
                self._unenforced[id(schema)] = place
            else:
                why = f"items must be an enum of at most {MAX_UNIQUE} values, or maxItems at most 1"
                raise _refused(place, "uniqueItems", why)

    def _contains(self, schema: Mapping[str, Any], place: str, found: dict[str, Any], conditions: list[Schema]) -> None:
        wanted, items = schema["contains"], found.get("prefixItems") or schema.get("items", True)
        least, most = schema.get("minContains", 1), schema.get("maxContains")
        self._count(place, len(repr(wanted)) + len(repr(items)))
        if wanted in (True, {}) or json.dumps(wanted) == json.dumps(items):  # every item fits
            if is_number(least) and is_number(found.get("minItems", 0)):
                found["minItems"] = max(least, found.get("minItems", 0))
            if most is not None and is_number(most) and is_number(found.get("maxItems", most)):
                found["maxItems"] = min(most, found.get("maxItems", most))
        elif least == 0 and most in (0, None):
            if most == 0:
                conditions.append({"items": self.negation(wanted, f"{place}/contains")})
        elif least == 1 and most is None and is_number(longest := schema.get("maxItems", math.inf)):
            fitting = self.schema(wanted, f"{place}/contains")
            self._count(place, MAX_CONTAINING**2)
            conditions.append(
                {
                    "anyOf": [
                        {"prefixItems": [True] * at + [fitting], "minItems": at + 1}
                        for at in range(int(min(longest, MAX_CONTAINING)))
                    ]
                }
            )
        else:
            raise _refused(place, "contains", "not with minContains or maxContains")

    def _object(self, schema: Mapping[str, Any], place: str, found: dict[str, Any], conditions: list[Schema]) -> None:
        found |= {key: schema[key] for key in ("properties", "patternProperties") if key in schema}
        if isinstance(properties := schema.get("properties"), dict):
            found["properties"] = {
                name: self.schema(inner, f"{place}/properties/{pointer_part(name)}")
                for name, inner in properties.items()
            }
        if isinstance(patterns := schema.get("patternProperties"), dict):
            found["patternProperties"] = {}
            for name, inner in patterns.items():
                key = self._key_pattern(name, f"{place}/patternProperties")
                value = self.schema(inner, f"{place}/patternProperties/{pointer_part(name)}")
                found["patternProperties"][key] = _both(found["patternProperties"].get(key, True), value)
        if "additionalProperties" in schema:
            found["additionalProperties"] = self.schema(schema["additionalProperties"], f"{place}/additionalProperties")
        elif "unevaluatedProperties" in schema and are_objects(found, "properties", "patternProperties"):
            self._unevaluated(schema, place, found)
        if "propertyNames" in schema and are_objects(found, "properties", "patternProperties"):
            self._named(schema, place, found)
        for key in ("dependencies", "dependentRequired", "dependentSchemas"):
            if not isinstance(schema.get(key, {}), dict):
                raise GrammarError(f"{place}/{key}: must be an object")
            for name, wanted in schema.get(key, {}).items():
                inner = f"{place}/{key}/{pointer_part(name)}"
                then = {"required": [name, *wanted]} if are_texts(wanted) else self.schema(wanted, inner)
                absent = {"properties": {name: False}}
                conditions.append({"anyOf": [absent, {"allOf": [{"required": [name]}, then]}]})

    def _named(self, schema: Mapping[str, Any], place: str, found: dict[str, Any]) -> None:
        """Enforce `propertyNames` by properties and patterns."""
        place = f"{place}/propertyNames"
        languages, wanted = self._languages, schema["propertyNames"]
        names = self._listed_names(wanted)
        if names is not None and not {"patternProperties", "minProperties", "maxProperties"} & set(schema):
            self._count(place, len(names))
            properties = found.get("properties", {})
            rest = found.get("additionalProperties", True)
            found["properties"] = {name: inner if name in names else False for name, inner in properties.items()}
            found["properties"] |= {name: rest for name in names if name not in properties and rest is not False}
            found["additionalProperties"] = False
            return
        try:
            allowed = self._names_language(wanted, place)
            if allowed == languages.all:
                return
            properties = found.get("properties", {})
            fitting = {name: languages.has(allowed, name) for name in properties}
            found["properties"] = {name: inner if fitting[name] else False for name, inner in properties.items()}
            rest = found.pop("additionalProperties", True)
            patterns = schema.get("patternProperties") or {}
            known = [languages.of_pattern(pattern) for pattern in patterns]
            named: dict[str, Schema] = {}
            for pattern, language in zip(patterns, known, strict=True):
                key = languages.pattern(languages.intersection((allowed, language)))
                inner = found["patternProperties"][self._key_pattern(pattern, place)]
                named[key] = _both(named.get(key, True), inner)
            if rest is not False:
                others = [languages.complement(language) for language in map(languages.literal, properties)]
                others += map(languages.complement, known)
                key = languages.pattern(languages.intersection((allowed, *others)))
                named[key] = _both(named.get(key, True), rest)
            found["patternProperties"] = named
            found["additionalProperties"] = False
        except UnreadableError as error:
            raise GrammarError(f"{place}: cannot be enforced: an expression {error}") from None
        except PatternError as error:
            raise GrammarError(f"{place}: cannot be enforced: it {error}; use patternProperties") from None

    def _listed_names(self, schema: Schema) -> dict[str, None] | None:
        """Return the strings that a schema allows, if it is no more than a list of values."""
        for _ in range(MAX_NEGATIONS):
            if not isinstance(schema, dict) or schema.keys() != {"$ref"}:
                break
            schema = self._document.resolved(schema, "/propertyNames/$ref")
        if not isinstance(schema, dict) or schema.keys() - {"type", "title", "description"} not in (
            {"const"},
            {"enum"},
        ):
            return None
        if schema.get("type", "string") != "string":
            return None
        values = [schema["const"]] if "const" in schema else list_of(schema["enum"])
        return dict.fromkeys(value for value in values if isinstance(value, str))

    def _names_language(self, schema: Schema, place: str) -> int:
        """Return the language of the strings that a schema allows."""
        self._count(place)
        languages = self._languages
        if isinstance(schema, bool):
            return languages.all if schema else languages.nothing
        if not isinstance(schema, dict):
            raise GrammarError(f"{place}: must be an object, true or false")
        parts = []
        for key, value in schema.items():
            inner = f"{place}/{key}"
            match key:
                case "type":
                    kinds = value if isinstance(value, list) else [value]
                    parts += [] if "string" in kinds else [languages.nothing]
                case "enum" | "const":
                    values = value if key == "enum" and isinstance(value, list) else [value]
                    strings = [item for item in values if isinstance(item, str)]
                    parts.append(languages.union(map(languages.literal, strings)))
                case "pattern" if isinstance(value, str):
                    parts.append(languages.of_pattern(value))
                case "minLength" | "maxLength" if type(value) is int and value >= 0:
                    times = (value, None) if key == "minLength" else (0, value)
                    parts.append(languages.repetition(languages.characters(EVERY), *times))
                case "format" if is_one_of(value, FORMAT_PATTERNS):
                    parts.append(languages.of_pattern(FORMAT_PATTERNS[value]))
                case "format" if is_one_of(value, LIBRARY_FORMATS):
                    raise GrammarError(f"{inner}: cannot be enforced for names: use pattern")
                case "anyOf" | "allOf" if isinstance(value, list):
                    found = [self._names_language(item, f"{inner}/{n}") for n, item in enumerate(value)]
                    parts.append(languages.union(found) if key == "anyOf" else languages.intersection(found))
                case "not":
                    parts.append(languages.complement(self._names_language(value, inner)))
                case "$ref":
                    parts.append(self._entered(self._names_language, schema, inner))
                case "oneOf" | "if" | "minLength" | "maxLength" | "pattern" | "anyOf" | "allOf":
                    raise GrammarError(f"{inner}: cannot be enforced for names")
        return languages.intersection(parts)

    def _unevaluated(self, schema: Mapping[str, Any], place: str, found: dict[str, Any]) -> None:
        """Enforce `unevaluatedProperties` by additionalProperties, beside the names of all parts that always apply."""
        names, patterns = dict[str, None](), dict[str, None]()
        if self._evaluated(schema, f"{place}/unevaluatedProperties", names, patterns, set()):
            return
        found["properties"] = dict.fromkeys(names, True) | found.get("properties", {})
        if patterns:
            keys = [self._key_pattern(pattern, f"{place}/unevaluatedProperties") for pattern in patterns]
            found["patternProperties"] = dict.fromkeys(keys, True) | found.get("patternProperties", {})
        found["additionalProperties"] = self.schema(schema["unevaluatedProperties"], f"{place}/unevaluatedProperties")

    def _evaluated(
        self, schema: Schema, place: str, names: dict[str, None], patterns: dict[str, None], seen: set[int]
    ) -> bool:
        """Add the properties that a schema evaluates; return True if it evaluates all."""
        self._count(place)
        if not isinstance(schema, dict) or id(schema) in seen:
            return False
        seen.add(id(schema))
        if "additionalProperties" in schema or (len(seen) > 1 and "unevaluatedProperties" in schema):
            return True
        names |= dict.fromkeys(object_of(schema.get("properties")))
        patterns |= dict.fromkeys(object_of(schema.get("patternProperties")))
        always = list(list_of(schema.get("allOf")))
        if "$ref" in schema:
            always.append(self._document.resolved(schema, place))
        every = [self._evaluated(part, place, names, patterns, seen) for part in always]
        perhaps = [*list_of(schema.get("anyOf")), *list_of(schema.get("oneOf"))]
        perhaps += [schema[key] for key in ("if", "then", "else") if key in schema]
        perhaps += object_of(schema.get("dependentSchemas")).values()
        for part in perhaps:
            more, further = dict[str, None](), dict[str, None]()
            whole = self._evaluated(part, place, more, further, set(seen))
            if whole or set(more) - set(names) or set(further) - set(patterns):
                raise GrammarError(f"{place}: cannot be enforced beside alternatives: use additionalProperties in each")
        return any(every)

    # Schemas made of others.

    def _combined(self, schema: Mapping[str, Any], place: str, found: dict[str, Any], conditions: list[Schema]) -> None:
        cases, grouped = self._cases(schema, place)
        conditions += cases
        discriminator = self._discriminator(schema.get("oneOf"), place)
        for key in ("allOf", "anyOf", "oneOf"):
            if key == "oneOf" and discriminator is not None:
                named = {"required": [discriminator]}
                ways = [self.schema(part, f"{place}/oneOf/{n}") for n, part in enumerate(schema["oneOf"])]
                conditions.append(_any([_both(way, named) for way in ways]))
            elif isinstance(parts := schema.get(key), list):
                inner = [(n, part) for n, part in enumerate(parts) if id(part) not in grouped]
                if inner or not parts:
                    found[key] = [self.schema(part, f"{place}/{key}/{n}") for n, part in inner]
            elif key in schema:
                found[key] = parts
        if "$ref" in schema:
            found["$ref"] = self._reference(schema, f"{place}/$ref")
        if "not" in schema:
            conditions.append(self.negation(schema["not"], f"{place}/not"))
        if "if" in schema and ("then" in schema or "else" in schema) and id(schema) not in grouped:
            conditions.append(self._conditional(schema, place))

    def _cases(self, schema: Mapping[str, Any], place: str) -> tuple[list[Schema], set[int]]:
        """Return conditions for the ifs that ask for values of the same property, each a list of cases, and the
        schemas with these ifs, by identity. One by one their combinations would be too many."""
        groups: dict[str, list[tuple[list[Any], Mapping[str, Any]]]] = {}
        if schema.get("type") == "object":
            parts = [part for part in list_of(schema.get("allOf")) if object_of(part).keys() <= IF_ALONE]
            for part in (schema, *parts):
                if "if" in part and (found := _asked_value(part["if"], schema.get("required"))) is not None:
                    groups.setdefault(found[0], []).append((found[1], part))
        conditions, grouped = list[Schema](), set[int]()
        for name, members in groups.items():
            if len(members) == 1:
                continue
            grouped |= {id(part) for _, part in members}
            values = list({json.dumps(value): value for asked, _ in members for value in asked}.values())
            inner = [
                {key: self.schema(part[key], f"{place}/{key}") for key in ("then", "else") if key in part}
                for _, part in members
            ]
            self._count(place, 8 * len(values) * len(members))
            cases: list[Schema] = []
            for value in values:
                case: Schema = {"properties": {name: {"const": value}}, "required": [name]}
                for (asked, _), then in zip(members, inner, strict=True):
                    case = _both(case, then.get("then" if value in asked else "else", True))
                cases.append(case)
            other = self.negation({"properties": {name: {"enum": values}}, "required": [name]}, f"{place}/if")
            for then in inner:
                other = _both(other, then.get("else", True))
            conditions.append(_any([*cases, other]))
        return conditions, grouped

    def _discriminator(self, parts: Any, place: str) -> str | None:
        """Return a property with other values in each part of a oneOf, so that no value with it fits two of them; None
        if there is none. Generators leave it out of what is required where it has a default, though they write it."""
        found: dict[str, list[set[str]]] = {}
        for part in list_of(parts):
            self._count(place)
            for _ in range(MAX_NEGATIONS):
                if not isinstance(part, dict) or "$ref" not in part:
                    break
                part = self._document.resolved(part, place)
            if not isinstance(part, dict) or part.get("type") != "object":
                return None
            for name, inner in object_of(part.get("properties")).items():
                values = [inner["const"]] if "const" in object_of(inner) else list_of(object_of(inner).get("enum"))
                self._count(place, len(values))
                if are_texts(values) and values:
                    found.setdefault(name, []).append(set(values))
        for name, sets in found.items():
            if len(sets) == len(parts) > 0 and len(set().union(*sets)) == sum(map(len, sets)):
                return name
        return None

    def _conditional(self, schema: Mapping[str, Any], place: str) -> Schema:
        """Return if, then and else as alternatives that exclude one another."""
        asked, inner = schema["if"], f"{place}/if"
        held, broken = self.schema(asked, inner), self.negation(asked, inner)
        if "then" in schema:
            held = _both(held, self.schema(schema["then"], f"{place}/then"))
        if "else" in schema:
            broken = _both(broken, self.schema(schema["else"], f"{place}/else"))
        return _any([held, broken])

    def negation(self, schema: Schema, place: str) -> Schema:
        """Return a schema for all values that a schema does not allow; GrammarError if there is none."""
        self._count(place)
        if isinstance(schema, bool):
            return not schema
        if not isinstance(schema, dict):
            raise GrammarError(f"{place}: must be an object, true or false")
        self._negations += 1
        if self._negations > MAX_NEGATIONS:
            raise GrammarError(f"{place}: cannot be enforced: it negates more than {MAX_NEGATIONS} levels of schemas")
        ways: list[Schema] = []
        for key, value in schema.items():
            ways += self._ways_out(key, value, schema, f"{place}/{pointer_part(key)}")
        self._negations -= 1
        return _any(ways)

    def _ways_out(self, key: str, value: Any, schema: Mapping[str, Any], place: str) -> Sequence[Schema]:
        """Return schemas of which one allows each value that breaks a keyword."""
        match key:
            case "type":
                return self._other_types(value, place)
            case "const":
                return self._other_values([value], place)
            case "enum" if isinstance(value, list):
                return self._other_values(value, place)
            case "pattern" if isinstance(value, str):
                languages = self._languages
                try:
                    self._count(place, len(value))
                    texts = languages.patterns(languages.complement(languages.of_pattern(value)))
                    self._count(place, sum(map(len, texts)))
                except (PatternError, UnreadableError) as error:
                    raise GrammarError(f"{place}: cannot be enforced within not or if: it {error}") from None
                return [{"type": "string", "allOf": [{"pattern": text} for text in texts]}]
            case "minLength" | "minItems" | "minProperties" if is_number(value):
                opposite = {"type": TYPE_OF[key[3:]], f"max{key[3:]}": value - 1}
                return [opposite] if value > 0 else []
            case "maxLength" | "maxItems" | "maxProperties" if is_number(value):
                return [{"type": TYPE_OF[key[3:]], f"min{key[3:]}": value + 1}]
            case "minimum" | "exclusiveMinimum" | "maximum" | "exclusiveMaximum" if is_number(value):
                opposite = {"type": "number"}
                self._numbers({BOUNDS[key][0]: value}, place, opposite)
                return [opposite]
            case "required" if are_texts(value):
                return [{"type": "object", "properties": {name: False}} for name in value]
            case "properties" if isinstance(value, dict):
                broken = {name: self.negation(inner, f"{place}/{pointer_part(name)}") for name, inner in value.items()}
                return [
                    {"type": "object", "properties": {name: inner}, "required": [name]}
                    for name, inner in broken.items()
                    if inner is not False
                ]
            case "prefixItems" if isinstance(value, list):
                self._count(place, len(value) ** 2)
                return [
                    {"type": "array", "prefixItems": [True] * at + [self.negation(item, place)], "minItems": at + 1}
                    for at, item in enumerate(value)
                ]
            case "dependentRequired" | "dependentSchemas" | "dependencies" if isinstance(value, dict):
                return [self._unmet(name, needed, place) for name, needed in value.items()]
            case "if":
                then = self.negation(schema.get("then", True), f"{place}/then")
                other = self.negation(schema.get("else", True), f"{place}/else")
                return [_both(self.schema(value, place), then), _both(self.negation(value, place), other)]
            case "contains" if not {"minContains", "maxContains"} & set(schema):
                return [{"type": "array", "items": self.negation(value, place)}]
            case "allOf" if isinstance(value, list):
                return [self.negation(item, f"{place}/{n}") for n, item in enumerate(value)]
            case "anyOf" if isinstance(value, list):
                return [{"allOf": [self.negation(item, f"{place}/{n}") for n, item in enumerate(value)]}]
            case "not":
                return [self.schema(value, place)]
            case "$ref":
                return [self._entered(self.negation, schema, place)]
            case "items" | "additionalProperties" | "unevaluatedProperties" if value in (True, {}):
                return []
            case "format" if not is_one_of(value, LIBRARY_FORMATS) and not is_one_of(value, FORMAT_PATTERNS):
                return []
        if key in CONSTRAINTS:
            raise GrammarError(f"{place}: cannot be enforced within not or if")
        return []

    def _unmet(self, name: str, needed: Any, place: str) -> Schema:
        """Return a schema for objects with a property, but without what it needs."""
        if are_texts(needed):
            ways: Schema = _any([{"properties": {other: False}} for other in needed])
        else:
            ways = self.negation(needed, f"{place}/{pointer_part(name)}")
        return _both({"type": "object", "required": [name]}, ways)

    def _other_types(self, value: Any, place: str) -> Sequence[Schema]:
        names = set(map(str, value if isinstance(value, list) else [value]))
        if wrong := names - {*OTHER_TYPES, "number", "integer"}:
            raise GrammarError(f"{place}: {min(wrong)[:40]} is not a type")
        if "integer" in names and "number" not in names:
            raise GrammarError(f"{place}: cannot be enforced within not or if: integer has no opposite; use number")
        others = [name for name in (*OTHER_TYPES, "number") if name not in names]
        return [{"type": others}] if others else []

    def _other_values(self, values: Sequence[Any], place: str) -> Sequence[Schema]:
        """Return schemas for all values but these."""
        if any(isinstance(value, list | dict) for value in values):
            raise GrammarError(f"{place}: cannot be enforced within not or if: has a list or an object")
        rounded, size = inexact(list(values))
        self._count(place, size)
        for wrong in rounded:
            raise GrammarError(f"{place}: cannot be enforced: {wrong} has more digits than a 64-bit float")
        strings = [value for value in values if isinstance(value, str)]
        numbers = sorted({value for value in values if isinstance(value, int | float) and not isinstance(value, bool)})
        left = [value for value in (True, False) if not any(value is other for other in values)]
        free = {"array", "object"} | ({"null"} if None not in values else set())
        free |= ({"string"} if not strings else set()) | ({"number"} if not numbers else set())
        free |= {"boolean"} if len(left) == 2 else set()
        found: list[Schema] = [{"type": [name for name in (*OTHER_TYPES, "number") if name in free]}]
        if len(left) == 1:
            found.append({"const": left[0]})
        if strings:
            languages = self._languages
            try:
                other = languages.complement(languages.union(map(languages.literal, strings)))
                found.append({"type": "string", "pattern": languages.pattern(other)})
                self._count(place, len(found[-1]["pattern"]))
            except PatternError as error:
                raise GrammarError(f"{place}: cannot be enforced within not or if: it {error}") from None
        if numbers:
            found.append({"type": "number", "exclusiveMaximum": numbers[0]})
            found += [
                {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high} for low, high in pairwise(numbers)
            ]
            found.append({"type": "number", "exclusiveMinimum": numbers[-1]})
        return found

    def _finite(self, schema: Schema) -> list[Any] | None:
        """Return the values that a schema allows, if few are listed; None if others are allowed, or if it is not
        plain."""
        for _ in range(MAX_NEGATIONS):
            if not isinstance(schema, dict) or set(schema) & (UNDENIED | {"not", "anyOf", "allOf", "pattern"}):
                return None
            if "$ref" not in schema:
                break
            schema = self._document.resolved(schema, "")
        values = schema.get("enum") if isinstance(schema.get("enum"), list) else None
        if "const" in schema:
            values = [schema["const"]]
        kinds = schema.get("type")
        if values is None and kinds in ("boolean", "null"):
            values = [False, True] if kinds == "boolean" else [None]
        if values is None or any(isinstance(value, list | dict) for value in values):
            return None
        distinct = {json.dumps(value + 0.0 if is_exact(value) else value): value for value in values}
        return list(distinct.values())

    # References.

    def _reference(self, schema: Mapping[str, Any], place: str) -> str:
        """Return a reference to the rewritten definition of what a schema refers to."""
        target = self._document.resolved(schema, place)
        name = self._names.get(id(target))
        if name is None:
            name = self._names[id(target)] = f"d{len(self._names)}"
            reference = str(schema["$ref"])[:80]
            self._pending.append((name, target, reference[1:] if reference.startswith("#/") else reference))
        return f"#/$defs/{name}"

    def _entered(self, made: Callable[[Schema, str], Made], schema: Mapping[str, Any], place: str) -> Made:
        """Return what is made of the target of a schema's reference."""
        self._negations += 1
        if self._negations > MAX_NEGATIONS:
            raise GrammarError(f"{place}: cannot be enforced: it refers to itself")
        found = made(self._document.resolved(schema, place), place)
        self._negations -= 1
        return found


IF_ALONE = frozenset(["if", "then", "else"])
"""Keywords of a part of allOf that consists of a condition."""

TYPE_OF = {"Length": "string", "Items": "array", "Properties": "object"}
"""Types of values by the end of the keywords that limit their size."""

UNDENIED = frozenset(
    [
        *("$dynamicRef", "$recursiveRef", "additionalItems", "additionalProperties", "contains", "dependencies"),
        *("dependentRequired", "dependentSchemas", "format", "items", "multipleOf", "oneOf", "patternProperties"),
        *("prefixItems", "propertyNames", "unevaluatedItems", "unevaluatedProperties", "uniqueItems"),
    ]
)
"""Keywords without an opposite, at least with some values."""

CONSTRAINTS = UNDENIED.union(
    [
        *("allOf", "anyOf", "enum", "exclusiveMaximum", "exclusiveMinimum", "maxItems", "maxLength", "maxProperties"),
        *("maximum", "minItems", "minLength", "minProperties", "minimum", "pattern", "properties", "required"),
    ]
)
"""The same, with those whose value may be of the wrong type."""


def _refused(place: str, key: str, why: str) -> GrammarError:
    return GrammarError(f"{place}/{pointer_part(key)}: cannot be enforced: {why}")


def _can_stay(pattern: str, error: PatternError) -> bool:
    """Return True if an expression that cannot be rewritten needs no rewriting: it is only too large."""
    return isinstance(error, PatternTooLargeError) and "(?=" not in pattern and "(?!" not in pattern


def _asked_value(asked: Any, required: Any) -> tuple[str, list[Any]] | None:
    """Return the one property that an `if` asks for, and the values it asks for, in objects with these `required`
    properties; None if it asks for anything else."""
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


def _alternatives(schema: Schema) -> list[Schema]:
    """Return the alternatives of a schema that consists of alternatives, else itself."""
    return schema["anyOf"] if isinstance(schema, dict) and set(schema) == {"anyOf"} else [schema]


def _any(ways: Iterable[Schema]) -> Schema:
    """Return a schema that allows what one of these allows."""
    found = [part for way in ways for part in _alternatives(way) if part is not False]
    if True in found:
        return True
    return {"anyOf": found} if len(found) > 1 else found[0] if found else False


def _both(first: Schema, second: Schema) -> Schema:
    if False in (first, second):
        return False
    return first if second is True else second if first is True else {"allOf": [first, second]}
