"""`propertyNames`, which llguidance does not support, enforced by properties and patterns.

A list of names becomes the list of allowed properties. Any other schema of names becomes a language, which is
intersected with the languages of the object's own patterns.
"""

from __future__ import annotations

from typing import Any

from specdec.grammar.grammar import GrammarError
from specdec.grammar.json_schema.rewriter import Rewrite, Rewriter
from specdec.grammar.json_schema.schemas import Schema, both
from specdec.grammar.json_schema.strings import FORMAT_PATTERNS, LIBRARY_FORMATS, name_pattern
from specdec.grammar.json_schema.values import is_one_of, list_of, whole
from specdec.grammar.patterns import EVERY, PatternError, UnreadableError


def rewrite_property_names(rewriter: Rewriter, part: Rewrite) -> None:
    place, wanted = f"{part.place}/propertyNames", part.source["propertyNames"]
    names = _listed_names(rewriter, wanted)
    if names is not None and not {"patternProperties", "minProperties", "maxProperties"} & part.source.keys():
        rewriter.count(place, len(names))
        _allow_listed(part.keywords, names)
        return
    try:
        allowed = _names_language(rewriter, wanted, place)
        if allowed != rewriter.languages.all:
            _allow_language(rewriter, part, allowed, place)
    except UnreadableError as error:
        raise GrammarError(f"{place}: cannot be enforced: an expression {error}") from None
    except PatternError as error:
        raise GrammarError(f"{place}: cannot be enforced: it {error}; use patternProperties") from None


def _allow_listed(keywords: dict[str, Any], names: dict[str, None]) -> None:
    properties = keywords.get("properties", {})
    rest = keywords.get("additionalProperties", True)
    keywords["properties"] = {name: inner if name in names else False for name, inner in properties.items()}
    keywords["properties"] |= {name: rest for name in names if name not in properties and rest is not False}
    keywords["additionalProperties"] = False


def _allow_language(rewriter: Rewriter, part: Rewrite, allowed: int, place: str) -> None:
    """Forbid properties whose names are not in a language."""
    languages, keywords = rewriter.languages, part.keywords
    properties = keywords.get("properties", {})
    fitting = {name: languages.has(allowed, name) for name in properties}
    keywords["properties"] = {name: inner if fitting[name] else False for name, inner in properties.items()}
    rest = keywords.pop("additionalProperties", True)
    patterns = part.source.get("patternProperties") or {}
    known = [languages.of_pattern(pattern) for pattern in patterns]
    named: dict[str, Schema] = {}
    for pattern, language in zip(patterns, known, strict=True):
        key = languages.pattern(languages.intersection((allowed, language)))
        inner = keywords["patternProperties"][name_pattern(rewriter, pattern, place)]
        named[key] = both(named.get(key, True), inner)
    if rest is not False:
        others = [languages.complement(language) for language in map(languages.literal, properties)]
        others += map(languages.complement, known)
        key = languages.pattern(languages.intersection((allowed, *others)))
        named[key] = both(named.get(key, True), rest)
    keywords["patternProperties"] = named
    keywords["additionalProperties"] = False


def _listed_names(rewriter: Rewriter, schema: Schema) -> dict[str, None] | None:
    """Return the strings that a schema allows, if the schema only lists values; else None."""
    found = schema
    for found in rewriter.document.chain(schema, "/propertyNames/$ref"):
        if not isinstance(found, dict) or found.keys() != {"$ref"}:
            break
    if not isinstance(found, dict) or found.keys() - {"type", "title", "description"} not in ({"const"}, {"enum"}):
        return None
    if found.get("type", "string") != "string":
        return None
    values = [found["const"]] if "const" in found else list_of(found["enum"])
    return dict.fromkeys(value for value in values if isinstance(value, str))


def _names_language(rewriter: Rewriter, schema: Schema, place: str) -> int:
    """Return the language of the strings that a schema allows."""
    rewriter.count(place)
    languages = rewriter.languages
    if isinstance(schema, bool):
        return languages.all if schema else languages.nothing
    if not isinstance(schema, dict):
        raise GrammarError(f"{place}: must be an object, true or false")

    def language(inner: Schema, at: str) -> int:
        return _names_language(rewriter, inner, at)

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
            case "minLength" | "maxLength" if type(size := whole(value)) is int and size >= 0:
                times = (size, None) if key == "minLength" else (0, size)
                parts.append(languages.repetition(languages.characters(EVERY), *times))
            case "format" if is_one_of(value, FORMAT_PATTERNS):
                parts.append(languages.of_pattern(FORMAT_PATTERNS[value]))
            case "format" if is_one_of(value, LIBRARY_FORMATS):
                raise GrammarError(f"{inner}: cannot be enforced for names: use pattern")
            case "anyOf" | "allOf" if isinstance(value, list):
                found = [language(item, f"{inner}/{n}") for n, item in enumerate(value)]
                parts.append(languages.union(found) if key == "anyOf" else languages.intersection(found))
            case "not":
                parts.append(languages.complement(language(value, inner)))
            case "$ref":
                parts.append(rewriter.entered(language, schema, inner))
            case "oneOf" | "if" | "minLength" | "maxLength" | "pattern" | "anyOf" | "allOf":
                raise GrammarError(f"{inner}: cannot be enforced for names")
    return languages.intersection(parts)
