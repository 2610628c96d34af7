"""Adds tokens defined outside tokenizer.json to the library's tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import tokenizers

from specdec.engine.added_tokens import AddedToken


def add(tokenizer: tokenizers.Tokenizer, tokens: Sequence[AddedToken]) -> None:
    """Add tokens to a tokenizer; an existing one gets these flags."""
    if tokens:
        tokenizer.add_tokens([tokenizers.AddedToken(**asdict(token)) for token in tokens])
