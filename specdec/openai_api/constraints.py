"""Constraints on the text of an answer: `response_format`, OpenAI's field, and `structured_outputs`, vLLM's."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from specdec.grammar.ebnf import in_lark, is_ebnf
from specdec.grammar.grammar import MAX_SOURCE_BYTES, GrammarError
from specdec.grammar.json_schema.rewriting import supported
from specdec.grammar.json_schema.text_check import KEYWORDS
from specdec.openai_api.errors import refused, unknown, wrong
from specdec.openai_api.fields import flag
from specdec.openai_api.structural_tags import tags_in_lark

GRAMMARS = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "lark"}
"""Fields of `structured_outputs`, mapped to client options."""

FURTHER = ("json_object", "structural_tag")
"""Fields of `structured_outputs` that are converted to one of these options."""


def constraint(given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the grammar option, if the request has a constraint; ApiError for an invalid one, or for several."""
    wanted = given.get("response_format", {"type": "text"})
    if isinstance(wanted, dict) and wanted.get("type") == "json":
        wanted = _of_tgi(wanted)
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    own = given.get("structured_outputs", {})
    if not isinstance(own, dict):
        raise wrong("structured_outputs", own, "an object")
    own = {name: value for name, value in own.items() if value is not None}
    layout = _layout(own)
    for name in own:
        if name not in (*GRAMMARS, *FURTHER):
            known = ", ".join(sorted((*GRAMMARS, *FURTHER)))
            raise unknown(f"structured_outputs.{name}", f"unknown parameter, must be one of {known}")
    if "json_object" in own and not flag(own, "json_object", where="structured_outputs."):
        del own["json_object"]  # false requests nothing
    if layout and not {"json", "json_object"} & own.keys():
        raise refused("structured_outputs.whitespace_pattern", "needs json or json_object")
    if len(own) > 1 or (own and kind != "text"):
        raise refused("structured_outputs", "must have one constraint, and none with response_format")
    if kind == "structural_tag":
        yield "lark", tags_in_lark(wanted, "response_format")
        return
    if kind not in ("text", "json_object", "json_schema"):
        kinds = "text, json_object, json_schema or structural_tag"
        if isinstance(wanted, dict):
            raise wrong("response_format.type", kind, kinds)
        raise wrong("response_format", wanted, f"an object whose type is {kinds}")
    if kind == "text":
        _check_format(wanted, "response_format", "type")
        yield from (_constraint(name, value, layout) for name, value in own.items())
    else:
        yield "json_schema", _schema(wanted)


def grammar_names(given: Mapping[str, Any]) -> dict[str, str]:
    """Return the caller's name for the grammar options: the field that holds the constraint. The request may still be
    invalid."""
    own = given.get("structured_outputs")
    held = [name for name in (*GRAMMARS, *FURTHER) if isinstance(own, dict) and own.get(name) not in (None, False)]
    field = f"structured_outputs.{held[0]}" if held else "response_format"
    return {name: field for option in GRAMMARS.values() for name in (option, f"grammar.{option}")}


def _layout(own: dict[str, Any]) -> dict[str, str]:
    """Remove the fields about white space, and vLLM's other fields without effect, from `structured_outputs`. Return
    the requested layout as a schema's `x-guidance`; empty for the default layout."""
    for name in ("disable_any_whitespace", "disable_additional_properties"):
        asked = flag(own, name, where="structured_outputs.")
        own.pop(name, None)
        if asked and name == "disable_additional_properties":
            instead = "is not supported: set additionalProperties to false in the schema"
            raise refused(f"structured_outputs.{name}", instead)
    pattern = own.pop("whitespace_pattern", None)
    if pattern is None:
        return {}
    if not isinstance(pattern, str):
        raise wrong("structured_outputs.whitespace_pattern", pattern, "a regular expression")
    return {"whitespace_pattern": pattern, "item_separator": ",", "key_separator": ":"}


def _constraint(name: str, value: object, layout: Mapping[str, str]) -> tuple[str, Any]:
    """Return the option for one field of `structured_outputs`."""
    match name:
        case "structural_tag":
            tags = _parsed(value, "structured_outputs.structural_tag")
            if not isinstance(tags, dict):
                raise wrong("structured_outputs.structural_tag", tags, "an object, or the JSON of one")
            return "lark", tags_in_lark(tags, "structured_outputs.structural_tag")
        case "json_object":
            return "json_schema", {"type": "object", **({"x-guidance": layout} if layout else {})}
        case "json" if layout:
            schema = _parsed(value, "structured_outputs.json")
            if not isinstance(schema, dict):
                raise wrong("structured_outputs.json", schema, "an object with whitespace_pattern")
            if not isinstance(guidance := schema.get("x-guidance", {}), dict):
                raise wrong("structured_outputs.json.x-guidance", guidance, "an object")
            return "json_schema", {**schema, "x-guidance": {**guidance, **layout}}
        case "grammar" if isinstance(value, str) and is_ebnf(value):
            try:
                return "lark", in_lark(value)
            except GrammarError as error:
                raise refused("structured_outputs.grammar", str(error)) from None
    return GRAMMARS[name], value


def _parsed(value: object, field: str) -> object:
    """Return the value of a JSON text; any other value, or a text that is not JSON, is returned unchanged. The limits
    on the body's structure do not cover the content of texts, so a long text is refused."""
    if isinstance(value, str):
        if len(value) > MAX_SOURCE_BYTES:
            raise refused(field, f"has {len(value)} characters, must have at most {MAX_SOURCE_BYTES}")
        with suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def _of_tgi(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return a `response_format` of TGI, as huggingface_hub sends it, converted to OpenAI's form."""
    _check_format(wanted, "response_format", "type", "value")
    if not isinstance(schema := wanted.get("value"), dict):
        raise wrong("response_format.value", schema, "a schema, an object")
    return {"type": "json_schema", "json_schema": {"schema": schema}}


def _schema(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a `response_format`. As in other servers of open models, json_object may carry a schema too:
    `schema`, or `value` from huggingface_hub."""
    if wanted["type"] == "json_object":
        field = "value" if "value" in wanted else "schema"
        _check_format(wanted, "response_format", "type", field)
        schema = wanted.get(field)
        if schema is not None and not isinstance(schema, dict):
            raise wrong(f"response_format.{field}", schema, "an object")
        return {"type": "object"} if schema is None else schema
    _check_format(wanted, "response_format", "type", "json_schema")
    inner = wanted.get("json_schema")
    if not isinstance(inner, dict):
        raise wrong("response_format.json_schema", inner, "an object with a schema")
    if not isinstance(schema := inner.get("schema"), dict):
        raise wrong("response_format.json_schema.schema", schema, "an object")
    _check_format(inner, "response_format.json_schema", "name", "description", "schema", "strict")
    if inner.get("strict") is not None and flag(inner, "strict", where="response_format.json_schema."):
        _check_enforced(schema)
    return schema


def _check_enforced(schema: dict[str, Any]) -> None:
    """Refuse a strict schema that can be checked only in the finished text. The orchestrator refuses other
    unenforceable schemas, strict or not."""
    written = json.dumps(schema)
    if not any(f'"{keyword}"' in written for keyword in KEYWORDS):
        return
    try:
        supported(schema)
    except GrammarError as error:
        for keyword in KEYWORDS:
            if f"/{keyword}: " in str(error):
                instead = f"remove {keyword} or strict; without strict, the finished text is checked for it"
                raise refused("response_format", f"{error}: {instead}") from None


def _check_format(given: Mapping[str, Any], name: str, *known: str) -> None:
    for field, value in given.items():
        if field not in known and value is not None:
            raise unknown(f"{name}.{field}", f"unknown parameter, must be one of {', '.join(known)}")
