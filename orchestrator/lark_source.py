"""Pieces of grammars, as llguidance's dialect of Lark writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specdec.grammar.compiler import STYLE
from specdec.grammar.grammar import lark_string


@dataclass(frozen=True)
class Marks:
    """Fixed texts of a tool format: those that are special tokens are spelt by their ids."""

    tokens: Mapping[str, int]

    def spelt(self, text: str) -> str:
        """Return a text as a part of a rule, where nothing stands for no text."""
        stripped = text.strip()
        if stripped in self.tokens:
            begin, _, end = text.partition(stripped)
            return " ".join(
                part for part in (self.spelt(begin), f"<[{self.tokens[stripped]}]>", self.spelt(end)) if part
            )
        return lark_string(text) if text else ""


def json_rule(name: str, schema: Mapping[str, Any]) -> str:
    """Return a rule of the JSON that fits a schema, in one line unless the schema itself says otherwise."""
    own = schema.get("x-guidance")
    style = {**STYLE, **(own if isinstance(own, dict) else {})}
    return f"{name}: %json " + json.dumps({**schema, "x-guidance": style})
