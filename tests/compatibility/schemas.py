"""JSON schemas as written by generators and people, each as the format of an answer and as the parameters of a tool."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.compatibility.asked import CHATS, SMALL, Asked

Schema = dict[str, Any]

MAX_TOKENS = 64


def of(schema: Any, **more: Any) -> Schema:
    """Return the schema of an object with one required property `a`, which has the given schema."""
    return {"type": "object", "properties": {"a": schema}, "required": ["a"], **more}


def string(**more: Any) -> Schema:
    return {"type": "string", **more}


NODE = {
    "type": "object",
    "properties": {"v": {"enum": [1, 2]}, "next": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]}},
    "required": ["v", "next"],
}
PAIR = {"type": "object", "properties": {"a": {"enum": ["x"]}, "b": {"enum": ["y"]}}}

SCHEMAS: dict[str, Schema] = {
    # types
    "boolean": of({"type": "boolean"}),
    "integer": of({"type": "integer"}),
    "number": of({"type": "number"}),
    "string": of(string()),
    "null": of({"type": "null"}),
    "several types": of({"type": ["boolean", "null"]}),
    "any value": of({}),
    "true": of(True),
    "nullable, as in OpenAPI": of({"type": "boolean", "nullable": True}),
    "array at the root": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    "string at the root": string(enum=["x", "y"]),
    "object without properties": {"type": "object"},
    "empty": {},
    # enumerations
    "enum": of({"enum": ["x", "y"]}),
    "enum of several types": of({"enum": ["x", 1, None, True]}),
    "const": of({"const": "x"}),
    "const object": of({"const": {"b": [1, 2]}}),
    "enum in Unicode": of({"enum": ["é", "日本", "🙂"]}),
    # strings
    "length": of(string(minLength=2, maxLength=4)),
    "pattern": of(string(pattern="^[a-c]{2,4}$")),
    "pattern without anchors": of(string(pattern="[0-9]")),
    "pattern with a look-ahead": of(string(pattern="^(?!0)[0-9]{1,3}$")),
    "pattern of pydantic's Decimal": of(string(pattern=r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$")),
    "pattern, lazy": of(string(pattern="^a+?b$")),
    "date-time": of(string(format="date-time")),
    "date": of(string(format="date")),
    "time": of(string(format="time")),
    "email": of(string(format="email")),
    "uuid": of(string(format="uuid")),
    "ipv4": of(string(format="ipv4")),
    "uri": of(string(format="uri")),
    "binary": of(string(format="binary")),
    "unknown format": of(string(format="phone")),
    # numbers
    "integer range": of({"type": "integer", "minimum": 3, "maximum": 17}),
    "integers of 64 bits": of({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}),
    "exclusive range": of({"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 10}),
    "number range": of({"type": "number", "minimum": 0, "maximum": 1}),
    "multipleOf": of({"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100}),
    # arrays
    "array": of({"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 3}),
    "array of at least two": of({"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4}),
    "uniqueItems": of({"type": "array", "items": {"enum": ["x", "y", "z"]}, "uniqueItems": True, "maxItems": 3}),
    "contains": of({"type": "array", "items": {"enum": ["x", "y"]}, "contains": {"const": "x"}, "maxItems": 3}),
    "tuple": of({"type": "array", "prefixItems": [{"enum": ["x"]}, {"type": "boolean"}], "minItems": 2, "maxItems": 2}),
    "tuple without more items": of({"type": "array", "prefixItems": [{"enum": ["x"]}], "items": False}),
    "tuple of draft 7": of({"type": "array", "items": [{"enum": ["x"]}], "additionalItems": False}),
    "array of arrays": of(
        {"type": "array", "maxItems": 2, "items": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}}
    ),
    # objects
    "no other properties": of({"enum": ["x"]}, additionalProperties=False),
    "optional properties": PAIR,
    "record": of({"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 2}),
    "record of zod": of({"type": "object", "propertyNames": string(), "additionalProperties": {"type": "boolean"}}),
    "propertyNames": {"type": "object", "propertyNames": {"pattern": "^[a-c]$"}, "maxProperties": 2},
    "patternProperties": {
        "type": "object",
        "patternProperties": {"^[a-c]$": {"type": "boolean"}},
        "additionalProperties": False,
    },
    "number of properties": {**PAIR, "minProperties": 1, "maxProperties": 2},
    "dependentRequired": {**PAIR, "dependentRequired": {"a": ["b"]}, "additionalProperties": False},
    "unevaluatedProperties": {**PAIR, "unevaluatedProperties": False},
    "200 properties": {"type": "object", "properties": {f"p{n}": {"type": "boolean"} for n in range(200)}},
    "nested objects": of(of(of(of({"enum": ["x"]})))),
    # combinations
    "anyOf": of({"anyOf": [{"type": "boolean"}, {"enum": ["x"]}]}),
    "oneOf": of({"oneOf": [{"type": "boolean"}, {"enum": ["x"]}]}),
    "allOf": of({"allOf": [{"type": "integer", "minimum": 1}, {"maximum": 9}]}),
    "not": of({"type": "integer", "minimum": 0, "maximum": 9, "not": {"const": 5}}),
    "if, then": {**PAIR, "if": {"properties": {"a": {"const": "x"}}}, "then": {"required": ["b"]}},
    # references
    "$defs": {"$defs": {"N": {"enum": ["x"]}}, **of({"$ref": "#/$defs/N"})},
    "definitions of draft 7": {"definitions": {"N": {"enum": ["x"]}}, **of({"$ref": "#/definitions/N"})},
    "recursion": {"$defs": {"Node": NODE}, "$ref": "#/$defs/Node"},
    "external reference": of({"$ref": "https://example.com/x.json"}),
    "annotations": of(
        {"title": "A", "description": "d", "default": "x", "examples": ["x"], "deprecated": True, "enum": ["x"]},
        **{"$schema": "https://json-schema.org/draft/2020-12/schema", "$comment": "c", "title": "T"},
    ),
}

OF_DRAFT_7 = [schema for name, schema in SCHEMAS.items() if "draft 7" in name]


def requests() -> Iterator[Asked]:
    """Yield each schema as the format of an answer, then as the parameters of a required tool."""
    chat = SMALL[CHATS] | {"max_tokens": MAX_TOKENS}
    for name, schema in SCHEMAS.items():
        formatted = {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}}
        tool = {"type": "function", "function": {"name": "w", "parameters": schema}}
        yield Asked("schemas", f"answer: {name}", "POST", CHATS, chat | formatted, schema)
        yield Asked(
            "schemas", f"call: {name}", "POST", CHATS, chat | {"tools": [tool], "tool_choice": "required"}, schema
        )
