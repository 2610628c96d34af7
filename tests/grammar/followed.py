"""Compiled grammars that follow texts, with the demo's tokenizer."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np

from specdec.engine.model_directory import ModelDirectory
from specdec.grammar.compiler import GrammarCompiler
from specdec.grammar.grammar import Grammar, Kind
from specdec.grammar.json_schema.rewriting import supported
from specdec.text.tokenizer import Tokenizer

DEMO = ModelDirectory(Path(__file__).parent.parent.parent / "demo" / "target")
TOKENIZER = Tokenizer(DEMO)
COMPILER = GrammarCompiler.of(DEMO)
(END, *_) = DEMO.end_tokens


class Followed:
    """A grammar, as the services compile it."""

    def __init__(self, kind: Kind, source: str) -> None:
        self._compiled = COMPILER.compile(Grammar(kind, (source,)))

    @classmethod
    def of_schema(cls, schema: dict[str, Any]) -> Followed:
        """Return the grammar of a schema, which is rewritten first."""
        return cls(Kind.JSON_SCHEMA, json.dumps(supported(schema)))

    def takes(self, text: str) -> bool:
        """Return whether a whole text fits."""
        found = self._compiled.begin([], frozenset({END}))
        found.commit(TOKENIZER.encode(text, special=False))
        return found.error is None and found.permits([], END)

    def takes_value(self, value: Any) -> bool:
        """Return whether a value fits, as generated texts spell it."""
        return self.takes(json.dumps(value, ensure_ascii=False))

    def text(self, seed: int, most: int = 400) -> str | None:
        """Draw a text token by token; None if it does not end."""
        found, draws, tokens = self._compiled.begin([], frozenset({END})), random.Random(seed), list[int]()
        while len(tokens) < most:
            mask = found.allowed([])
            assert mask is not None
            allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()
            token = END if END in allowed and draws.random() < 0.5 else draws.choice(allowed)
            if token == END:
                return b"".join(map(TOKENIZER.piece, tokens)).decode()
            found.commit([token])
            tokens.append(token)
        return None
