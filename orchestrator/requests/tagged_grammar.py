"""The grammar of tool calls with arguments between tags, as Lark for llguidance, and the schemas it can enforce.

Strings between the tags are verbatim, not JSON, so only their length or a list of values can be enforced. A schema with
further constraints on strings is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdec.grammar.compiler import style_of
from specdec.grammar.grammar import GrammarError, lark_string
from specdec.grammar.json_schema.rewriter import Work
from specdec.grammar.json_schema.rewriting import json_text, supported
from specdec.grammar.json_schema.strings import FORMAT_PATTERNS, LIBRARY_FORMATS
from specdec.grammar.json_schema.values import whole
from specdec.wire.tool_arguments import is_text, property_schemas, resolved, types_of
from specdec.wire.tool_formats import TaggedCall


@dataclass(frozen=True)
class Marks:
    """Spells the fixed texts of a tool format in Lark. `tokens`: the ids of marks that are special tokens."""

    tokens: Mapping[str, int]

    def spelt(self, text: str) -> str:
        """Return a text as part of a rule, with a special token spelt by its id; an empty text stays empty."""
        stripped = text.strip()
        if stripped in self.tokens:
            begin, _, end = text.partition(stripped)
            return " ".join(
                part for part in (self.spelt(begin), f"<[{self.tokens[stripped]}]>", self.spelt(end)) if part
            )
        return lark_string(text) if text else ""


def json_rule(name: str, schema: Mapping[str, Any]) -> str:
    """Return a rule for JSON on one line that matches a supported schema; the schema's own `x-guidance` may set other
    white space."""
    own = schema.get("x-guidance")
    style = {**style_of(schema), **(own if isinstance(own, dict) else {})}
    return f"{name}: %json " + json_text({**schema, "x-guidance": style})


DEFINITIONS = ("$defs", "definitions")

OF_OBJECT = frozenset(
    [
        "$comment",
        "$defs",
        "$id",
        "$schema",
        "additionalProperties",
        "default",
        "definitions",
        "description",
        "examples",
        "properties",
        "required",
        "strict",
        "title",
        "type",
        "x-guidance",
    ]
)
"""Keywords of an object schema that this grammar enforces, or that constrain nothing."""

OF_STRING = frozenset(
    [
        "$comment",
        "anyOf",
        "const",
        "contentEncoding",
        "contentMediaType",
        "default",
        "deprecated",
        "description",
        "enum",
        "examples",
        "maxLength",
        "minLength",
        "oneOf",
        "readOnly",
        "title",
        "type",
        "writeOnly",
    ]
)
"""The same for a string schema."""

KEY = re.compile(r"[^<>\"\s]+")


def tagged_problem(schema: Mapping[str, Any], style: TaggedCall, marker: str, work: Work) -> str:
    """Return why a schema cannot be enforced; empty if it can."""
    if others := sorted(set(schema) - OF_OBJECT):
        return f"has {others[0]}, which cannot be enforced in the model's format of calls"
    if '"$ref": "#"' in json.dumps(schema):
        return "is recursive at its root, which cannot be enforced in the model's format of calls"
    properties = property_schemas(schema)
    for name, inner in properties.items():
        if not KEY.fullmatch(name):
            return f"has a property {json.dumps(name)[:80]}, which the model's format cannot name"
        try:  # the list of a reference's target is written out again for each property that refers to it
            work.count(f"/properties/{name}", len(_values(resolved(inner, schema)) or ()))
        except GrammarError as error:
            return str(error)
        if is_text(types_of(inner, schema)):
            if problem := _string_problem(inner, schema, (style.value[1], marker)):
                return f"has a property {name} {problem}"
            continue
        try:
            supported(_with_definitions(inner, schema), work)
        except GrammarError as error:
            return f"has a property {name} that cannot be used: {error}"
    missing = [name for name in _required(schema) if name not in properties]
    return f"requires {json.dumps(missing[0])[:80]}, which is not one of its properties" if missing else ""


def _required(schema: Mapping[str, Any]) -> list[str]:
    found = schema.get("required")
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []


def _string_problem(inner: Mapping[str, Any], root: Mapping[str, Any], ends: Sequence[str]) -> str:
    """Return why a string's schema cannot be enforced; empty if it can. `ends`: texts that end a value for a parser."""
    schema = resolved(inner, root)
    beside = set(inner) - {"$ref", "default", "description", "title"} if "$ref" in inner else set()
    others = (set(schema) - OF_STRING) | beside
    if schema.get("format") not in (*LIBRARY_FORMATS, *FORMAT_PATTERNS):
        others.discard("format")  # an annotation
    if others:
        return f"with {min(others)}, which cannot be enforced for a string in the model's format"
    if any(isinstance(schema.get(key), list) and not all(map(_is_plain, schema[key])) for key in ("anyOf", "oneOf")):
        return "with alternatives, which cannot be enforced for a string in the model's format"
    lengths = [whole(schema[key]) for key in ("minLength", "maxLength") if key in schema]
    if any(type(length) is not int or length < 0 for length in lengths):
        return "with a length that is not an integer"
    ended = any(end in value for value in _values(schema) or [] for end in ends)
    return "with a value that the model's format cannot hold" if ended else ""


def _is_plain(schema: object) -> bool:
    return isinstance(schema, dict) and set(schema) <= {"type", "title", "description"}


@dataclass(frozen=True)
class TaggedRules:
    """Writes the rules for calls in a format with tags. `marker`: the text before each call."""

    style: TaggedCall
    marker: str
    marks: Marks

    def call(self, rule: str, name: str, schema: Mapping[str, Any]) -> Iterator[str]:
        """Yield the rules for a call of one function, with arguments in the order of the schema."""
        style, spelt = self.style, self.marks.spelt
        line = spelt(style.line)
        parts = [spelt(style.name[0]), spelt(name), spelt(style.name[1])]
        required, properties = _required(schema), property_schemas(schema)
        separator = style.line if style.value[0] else ""
        close = [spelt(style.key[1]), spelt(separator), spelt(style.value[0]), spelt(style.pad)]
        for number, (key, inner) in enumerate(properties.items()):
            argument = f"{rule}_{number}"
            parts.append(f"({line} {argument}){'' if key in required else '?'}")
            opening = [spelt(style.key[0]), spelt(key), *close]
            yield f"{argument}: {' '.join(filter(None, opening))} {argument}_value"
            yield from self._value(f"{argument}_value", inner, schema)
        if not properties and schema.get("additionalProperties", True) is True:
            parts.append(f"({line} {rule}_any)*")
            opening = [spelt(style.key[0]), "/[a-zA-Z0-9_]+/", *close]
            yield f"{rule}_any: {' '.join(filter(None, opening))} {rule}_any_value"
            yield from self._text(f"{rule}_any_value", "(.|\\n)*")
        if style.end:
            parts += [line, spelt(style.end)]
        yield f"{rule}: {' '.join(filter(None, parts))}"

    def _value(self, rule: str, schema: Mapping[str, Any], root: Mapping[str, Any]) -> Iterator[str]:
        """Yield the rules for a value and its closing tag."""
        closing = f"{self.marks.spelt(self.style.pad)} {self.marks.spelt(self.style.value[1])}"
        if not is_text(types_of(schema, root)):
            yield f"{rule}: {rule}_json {closing}"
            yield json_rule(f"{rule}_json", supported(_with_definitions(schema, root)))
            return
        found = resolved(schema, root)
        if (values := _values(found)) is not None:
            yield f"{rule}: ({' | '.join(lark_string(value) for value in values)}) {closing}"
            return
        least, most = whole(found.get("minLength", 0)), whole(found.get("maxLength", ""))
        yield from self._text(rule, "(.|\\n)*" if (least, most) == (0, "") else f"(.|\\n){{{least},{most}}}")

    def _text(self, rule: str, pattern: str) -> Iterator[str]:
        """Yield the rules for a string and its closing tag. The string must contain neither the closing tag nor a
        marker: a parser would take them for real ones."""
        end, marks = self.style.value[1], self.marks
        ends = "|".join(_escaped(text) for text in (end, self.marker) if text not in marks.tokens)
        excluded = f" & ~/(.|\\n)*({ends})(.|\\n)*/" if ends else ""
        terminal = rule.upper()
        lazy = "" if end in marks.tokens else "[lazy]"  # a special token cannot occur in text
        yield f"{rule}{lazy}: {terminal} {marks.spelt(self.style.pad + end)}"
        yield f"{terminal}: /{pattern}/{excluded}"


def _with_definitions(schema: Mapping[str, Any], root: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of an argument, with the definitions of the whole schema that it may refer to."""
    return {key: root[key] for key in DEFINITIONS if key in root} | dict(schema)


def _escaped(text: str) -> str:
    return re.sub(r"[^a-zA-Z0-9_]", lambda found: f"\\x{ord(found[0]):02x}", text)


def _values(schema: Mapping[str, Any]) -> list[str] | None:
    """Return the allowed texts of a string; None if any is allowed."""
    if "const" in schema:
        return [_spelt(schema["const"])]
    return [_spelt(value) for value in schema["enum"]] if isinstance(schema.get("enum"), list) else None


def _spelt(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
