"""Pieces of grammars in llguidance's dialect of Lark."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specdec.grammar.compiler import STYLE
from specdec.grammar.grammar import lark_string


@dataclass(frozen=True)
class Marks:
    """Fixed texts of a tool format, with special tokens spelt by their ids."""

    tokens: Mapping[str, int]

    def spelt(self, text: str) -> str:
        """Return a text as part of a rule; an empty text becomes nothing."""
        stripped = text.strip()
        if stripped in self.tokens:
            begin, _, end = text.partition(stripped)
            return " ".join(
                part for part in (self.spelt(begin), f"<[{self.tokens[stripped]}]>", self.spelt(end)) if part
            )
        return lark_string(text) if text else ""


def json_rule(name: str, schema: Mapping[str, Any]) -> str:
    """Return a rule for JSON of a schema, on one line unless the schema's own `x-guidance` sets other white space."""
    own = schema.get("x-guidance")
    style = {**STYLE, **(own if isinstance(own, dict) else {})}
    return f"{name}: %json " + json.dumps({**schema, "x-guidance": style})
