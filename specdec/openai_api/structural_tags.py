"""vLLM's structural tags: free text in which a trigger begins a tag, whose content matches a schema."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from specdec.grammar.grammar import MAX_RULES, GrammarError, lark_string
from specdec.grammar.json_schema.rewriter import Work
from specdec.grammar.json_schema.rewriting import json_text, supported
from specdec.openai_api.errors import refused, unknown, wrong

MAX_TAGS = MAX_RULES // 2
"""Maximum triggers, and maximum structures. Fewer structures fit if they begin with different triggers: a structure is
two rules of a grammar, a used trigger is one, and three are common to all."""

MAX_CHARACTERS = 1024
"""Maximum characters of a trigger, and of the beginning and end of a structure."""


def tags_in_lark(given: Mapping[str, Any], field: str) -> str:
    """Return the grammar of a text with these tags, in Lark; ApiError if they are invalid or unsupported. `field` names
    them in errors."""
    for name, value in given.items():
        if name == "format" and value is not None:
            raise refused(f"{field}.format", "is not supported: use structures and triggers")
        if name not in ("type", "structures", "triggers") and value is not None:
            raise unknown(f"{field}.{name}")
    structures, triggers = given.get("structures"), given.get("triggers")
    if not isinstance(triggers, list) or not triggers or not all(isinstance(text, str) and text for text in triggers):
        raise refused(f"{field}.triggers", "must be a list of texts")
    if not isinstance(structures, list) or not structures:
        raise wrong(f"{field}.structures", structures, "a list of objects with begin, schema and end")
    for name, texts in (("triggers", triggers), ("structures", structures)):
        if len(texts) > MAX_TAGS:
            raise refused(f"{field}.{name}", f"has {len(texts)} entries, must have at most {MAX_TAGS}")
    if max(map(len, triggers)) > MAX_CHARACTERS:
        raise refused(f"{field}.triggers", f"must have at most {MAX_CHARACTERS} characters each")
    begun: dict[str, list[int]] = {trigger: [] for trigger in triggers}
    for number, structure in enumerate(structures):
        begun[_trigger(structure, triggers, f"{field}.structures[{number}]")].append(number)
    used = {trigger: numbers for trigger, numbers in begun.items() if numbers}
    if len(structures) > (most := (MAX_RULES - 3 - len(used)) // 2):
        raise refused(
            f"{field}.structures", f"has {len(structures)} entries, must have at most {most} with {len(used)} triggers"
        )
    return "\n".join(_rules(structures, used, list(_schemas(structures, field))))


def _trigger(structure: Any, triggers: list[str], field: str) -> str:
    """Return the trigger of a structure: the first that its `begin` starts with."""
    if not isinstance(structure, dict) or not isinstance(structure.get("schema"), dict):
        raise refused(field, "must be an object with begin, schema and end")
    for name, value in structure.items():
        if name not in ("begin", "schema", "end"):
            raise unknown(f"{field}.{name}")
        if name != "schema" and not isinstance(value, str):
            raise wrong(f"{field}.{name}", value, "text")
        if name != "schema" and len(value) > MAX_CHARACTERS:
            raise refused(f"{field}.{name}", f"has {len(value)} characters, must have at most {MAX_CHARACTERS}")
    begin = structure.get("begin", "")
    found = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
    if found is None:
        raise refused(f"{field}.begin", "must begin with one of the triggers")
    return found


def _schemas(structures: list[Any], field: str) -> Iterator[str]:
    """Yield the JSON of the structures' schemas, as llguidance supports them."""
    work = Work()
    for number, structure in enumerate(structures):
        try:
            yield json_text(supported(structure["schema"], work))
        except GrammarError as error:
            raise refused(f"{field}.structures[{number}].schema", str(error)) from None


def _rules(structures: list[Any], begun: Mapping[str, list[int]], schemas: list[str]) -> Iterator[str]:
    yield "start: tag* TEXT"
    yield r"TEXT: /(.|\n)*/"
    yield "tag: " + " | ".join(f"head_{place} ({_choice(numbers)})" for place, numbers in enumerate(begun.values()))
    for place, trigger in enumerate(begun):
        yield f"head_{place}[lazy]: TEXT {lark_string(trigger)}"  # ends with the first trigger in the text
        for number in begun[trigger]:
            structure = structures[number]
            begin, end = structure["begin"].removeprefix(trigger), structure.get("end", "")
            parts = [lark_string(begin) if begin else "", f"schema_{number}", lark_string(end) if end else ""]
            yield f"tag_{number}: {' '.join(filter(None, parts))}"
            yield f"schema_{number}: %json {schemas[number]}"


def _choice(numbers: list[int]) -> str:
    return " | ".join(f"tag_{number}" for number in numbers)
