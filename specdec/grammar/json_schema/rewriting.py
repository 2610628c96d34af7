"""The entry points, and the rewriting of whole schemas: keyword by keyword, definition by definition."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from specdec.grammar.grammar import MAX_SOURCE_BYTES, GrammarError, Kind, source_violation
from specdec.grammar.json_schema.arrays import rewrite_array
from specdec.grammar.json_schema.combinations import rewrite_combinations
from specdec.grammar.json_schema.numbers import rewrite_bounds, rewrite_listed_values
from specdec.grammar.json_schema.objects import rewrite_object
from specdec.grammar.json_schema.rewriter import Rewrite, Rewriter, Work, refused
from specdec.grammar.json_schema.schemas import Schema, alternatives
from specdec.grammar.json_schema.shapes import TYPES, check_shapes
from specdec.grammar.json_schema.spelled_names import SpelledNames
from specdec.grammar.json_schema.strings import rewrite_string
from specdec.grammar.json_schema.text_check import TextCheck
from specdec.grammar.json_schema.values import list_of, object_of, whole
from specdec.grammar.patterns import PatternError

MAX_COMBINATIONS = 32
"""Maximum alternatives that the conditions of one object may create together, since llguidance follows all of them in
parallel."""

MAX_TOLD_CHARACTERS = 320
"""Maximum characters of an error message; the JSON pointer in it may be long."""

COPIED = frozenset(["maxLength", "maxProperties", "minLength", "minProperties", "multipleOf", "required", "type"])
"""Keywords that llguidance enforces and whose values contain no schema."""


def supported_source(source: str, *, checks: bool = False) -> tuple[str, TextCheck | None]:
    """Return the JSON of an equivalent schema that llguidance supports; GrammarError if there is none. With `checks`,
    the schema may allow more, and the check for the finished text is returned as well. A source that is not a JSON
    object is returned unchanged, so that compilation reports it."""
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


def supported(schema: Mapping[str, Any], work: Work | None = None) -> Mapping[str, Any]:
    """Return an equivalent schema that llguidance supports; GrammarError if there is none. With llguidance's `lenient`,
    the schema may allow more."""
    found, _ = _rewritten(schema, work or Work(), checks=False)
    return found


def json_text(schema: Mapping[str, Any]) -> str:
    """Return the JSON of a schema; GrammarError if it is too long. Lone surrogates, which UTF-8 cannot encode, stay
    escaped."""
    for ascii_alone in (False, True):
        found, size = list[str](), 0
        try:
            for piece in json.JSONEncoder(ensure_ascii=ascii_alone, separators=(",", ":")).iterencode(schema):
                found.append(piece)
                size += len(piece.encode())
                if size > MAX_SOURCE_BYTES:
                    raise GrammarError(f"takes more than {MAX_SOURCE_BYTES} bytes with its conditions written out")
        except UnicodeEncodeError:
            continue
        except RecursionError:
            break
        return "".join(found)
    raise GrammarError("is nested too deeply")


def _rewritten(schema: Mapping[str, Any], work: Work, *, checks: bool) -> tuple[Mapping[str, Any], TextCheck | None]:
    """Return the result of `supported`; with `checks`, also the check for parts that the schema leaves out, if any.

    With `lenient`, these parts are left out without a check. If any other part has no equivalent, return the schema
    itself: llguidance then ignores the keywords that it does not support."""
    lenient = object_of(schema.get("x-guidance")).get("lenient") is True
    try:
        rewriter = _SchemaRewriter(schema, work, checks=checks or lenient)
        return rewriter.whole(), None if lenient else rewriter.check()
    except (GrammarError, PatternError, RecursionError) as error:
        if lenient:
            return schema, None
        raise _refusal(error) from None


def _refusal(error: Exception) -> GrammarError:
    """Return the reason why a schema cannot be rewritten, at a length that can be shown."""
    if isinstance(error, RecursionError):
        return GrammarError("is nested too deeply")
    if isinstance(error, PatternError):  # the work budget of the whole request is spent
        return GrammarError(f"cannot be enforced: an expression {error}")
    message = str(error)
    if len(message) <= MAX_TOLD_CHARACTERS:
        return GrammarError(message)
    half = MAX_TOLD_CHARACTERS // 2
    return GrammarError(f"{message[:half]} ... {message[-half:]}")


class _SchemaRewriter(Rewriter):
    def __init__(self, root: Mapping[str, Any], work: Work, *, checks: bool) -> None:
        super().__init__(root, work, checks=checks)
        self._root = root

    def whole(self) -> dict[str, Any]:
        found = self.schema(self._root, "")
        if found is False:
            raise GrammarError("matches no text")
        result: dict[str, Any] = {} if found is True else found
        definitions = {}
        while self.pending:
            name, target, place = self.pending.pop()
            definitions[name] = self.schema(target, place), place
        result = SpelledNames(self, definitions).whole(result)
        return result | {key: self._root[key] for key in ("x-guidance",) if key in self._root}

    def check(self) -> TextCheck | None:
        """Return the check for parts that the result leaves out; None if there are none."""
        return TextCheck(self._root, self.document, self.unenforced) if self.unenforced else None

    def schema(self, schema: Schema, place: str) -> Schema:
        self.count(place, len(schema) if isinstance(schema, dict) else 0)
        if not isinstance(schema, dict):
            if isinstance(schema, bool):
                return schema
            raise GrammarError(f"{place or '/'}: must be an object, true or false")
        check_shapes(schema, place)
        part = Rewrite(schema, place, {key: whole(schema[key]) for key in COPIED if key in schema})
        rewrite_listed_values(self, part)
        rewrite_bounds(self, part)
        rewrite_string(self, part)
        rewrite_array(self, part)
        rewrite_object(self, part)
        rewrite_combinations(self, part)
        for key in ("$dynamicRef", "$recursiveRef"):
            if key in schema:
                raise refused(place, key, "use $ref")
        return _with_conditions(part)


def _with_conditions(part: Rewrite) -> Schema:
    """Return a rewritten schema with its conditions as additional parts of allOf."""
    if False in part.conditions:
        return False
    if conditions := [condition for condition in part.conditions if condition is not True]:
        if max(_combinations(conditions, kind) for kind in TYPES) > MAX_COMBINATIONS:
            raise GrammarError(
                f"{part.place or '/'}: has conditions that make more than {MAX_COMBINATIONS} combinations: list the "
                "allowed objects in anyOf"
            )
        part.keywords["allOf"] = [*list_of(part.keywords.get("allOf")), *conditions]
    return part.keywords


def _combinations(conditions: Sequence[Schema], kind: str) -> int:
    """Return the number of combinations of the conditions' alternatives for values of a type; 1 if only one condition
    has alternatives."""
    ways = [
        sum(kind in object_of(way).get("type", kind) for way in alternatives(condition)) for condition in conditions
    ]
    numbers = [number for number in ways if number > 1]
    return math.prod(numbers) if len(numbers) > 1 else 1
