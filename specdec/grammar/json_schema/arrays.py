"""Arrays: `prefixItems`, `items`, `contains` and `uniqueItems`.

llguidance does not support the last two. `contains` becomes an alternative for each position of the matching item,
`uniqueItems` an alternative for each order of the items.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import permutations
from typing import Any

from specdec.grammar.grammar import GrammarError
from specdec.grammar.json_schema.negation import UNDENIED, negation
from specdec.grammar.json_schema.numbers import is_exact
from specdec.grammar.json_schema.references import Document
from specdec.grammar.json_schema.rewriter import Rewrite, Rewriter, refused
from specdec.grammar.json_schema.schemas import Schema, any_of
from specdec.grammar.json_schema.values import is_at_most, is_number, whole

MAX_CONTAINING = 16
"""Maximum position of the item that matches `contains`: the grammar has an alternative for each position."""

MAX_UNIQUE = 4
"""Maximum distinct values for items that must be unique: the grammar has an alternative for each order."""

APPLICATORS = frozenset(["allOf", "anyOf", "oneOf", "$ref", "if", "contains", "dependentSchemas"])
"""Keywords that may evaluate items; `unevaluatedItems` does not apply to these items."""

NO_ARRAYS = ("boolean", "null", "number", "object", "string")

UNLISTED = UNDENIED | {"not", "anyOf", "allOf", "pattern"}
"""Keywords that may exclude some of a schema's listed values."""


def rewrite_array(rewriter: Rewriter, part: Rewrite) -> None:
    source, place = part.source, part.place
    prefix, items = source.get("prefixItems"), source.get("items")
    if isinstance(items, list):  # before draft 2020-12
        prefix, items = items, source.get("additionalItems")
    if isinstance(prefix, list):
        part.keywords["prefixItems"] = [
            rewriter.schema(item, f"{place}/prefixItems/{n}") for n, item in enumerate(prefix)
        ]
    elif prefix is not None:
        part.keywords["prefixItems"] = prefix
    if items is None and "unevaluatedItems" in source:
        if APPLICATORS & source.keys():
            raise refused(place, "unevaluatedItems", "use items beside prefixItems")
        items = source["unevaluatedItems"]
    if items is not None:
        part.keywords["items"] = rewriter.schema(items, f"{place}/items")
    part.keywords.update({key: whole(source[key]) for key in ("minItems", "maxItems") if key in source})
    if "contains" in source:
        _rewrite_contains(rewriter, part)
    if source.get("uniqueItems") is True and not is_at_most(source.get("maxItems"), 1):
        _rewrite_unique(rewriter, part, None if prefix else _listed_values(rewriter.document, items))


def _rewrite_contains(rewriter: Rewriter, part: Rewrite) -> None:
    source, place, keywords = part.source, part.place, part.keywords
    wanted, items = source["contains"], keywords.get("prefixItems") or source.get("items", True)
    least, most = whole(source.get("minContains", 1)), whole(source.get("maxContains"))
    rewriter.count(place, len(repr(wanted)) + len(repr(items)))
    if wanted in (True, {}) or json.dumps(wanted) == json.dumps(items):  # every item matches
        if is_number(least) and is_number(keywords.get("minItems", 0)):
            keywords["minItems"] = max(least, keywords.get("minItems", 0))
        if most is not None and is_number(most) and is_number(keywords.get("maxItems", most)):
            keywords["maxItems"] = min(most, keywords.get("maxItems", most))
    elif least == 0 and most in (0, None):
        if most == 0:
            part.conditions.append({"items": negation(rewriter, wanted, f"{place}/contains")})
    elif least == 1 and most is None and is_number(longest := source.get("maxItems", math.inf)):
        fitting = rewriter.schema(wanted, f"{place}/contains")
        rewriter.count(place, MAX_CONTAINING**2)
        places = range(int(min(longest, MAX_CONTAINING)))
        _require_one(part, [{"prefixItems": [True] * at + [fitting], "minItems": at + 1} for at in places])
    else:
        raise GrammarError(f"{place}/contains: cannot be enforced with this minContains or maxContains")


def _rewrite_unique(rewriter: Rewriter, part: Rewrite, values: Sequence[Any] | None) -> None:
    """Rewrite `uniqueItems` for items from `values`, or of any value if it is None."""
    if values is not None and len(values) <= MAX_UNIQUE:
        rewriter.count(part.place, math.factorial(len(values)) * 8)
        orders = [[{"const": value} for value in order] for order in permutations(values)]
        _require_one(part, [{"prefixItems": order, "items": False} for order in orders])
    elif rewriter.checks:
        rewriter.unenforced[id(part.source), "uniqueItems"] = part.place
    else:
        why = f"items must be an enum of at most {MAX_UNIQUE} values, or maxItems at most 1"
        raise refused(part.place, "uniqueItems", why)


def _require_one(part: Rewrite, ways: Sequence[dict[str, Any]]) -> None:
    """Add the condition that an array fits one of these schemas. Each of them gets the type array: otherwise the parser
    would follow a value of another type once per schema."""
    types = part.source.get("type", NO_ARRAYS)
    others = [kind for kind in ([types] if isinstance(types, str) else types) if kind != "array"]
    part.conditions.append(any_of([{"type": others} if others else False, *({"type": "array", **way} for way in ways)]))


def _listed_values(document: Document, schema: Schema) -> list[Any] | None:
    """Return the distinct values that a schema allows, if the schema only lists values; else None."""
    chain = list(document.chain(schema, ""))
    if any(not isinstance(found, dict) or UNLISTED & found.keys() for found in chain):
        return None
    values = chain[-1].get("enum") if isinstance(chain[-1].get("enum"), list) else None
    if "const" in chain[-1]:
        values = [chain[-1]["const"]]
    kinds = chain[-1].get("type")
    if values is None and kinds in ("boolean", "null"):
        values = [False, True] if kinds == "boolean" else [None]
    if values is None or any(isinstance(value, list | dict) for value in values):
        return None
    distinct = {json.dumps(value + 0.0 if is_exact(value) else value): value for value in values}
    return list(distinct.values())
