"""Prompts from text that the demo pair has not seen: the beginnings of held-out files."""

from __future__ import annotations

import random

from tokenizers import Tokenizer

from demo import corpus
from specdec.local import DEMO


def held_out(count: int, tokens: int = 96, seed: int = 0) -> list[list[int]]:
    """Return `count` prompts of `tokens` token ids each, from random places of held-out files."""
    tokenizer = Tokenizer.from_file(str(DEMO / "target" / "tokenizer.json"))
    generator = random.Random(seed)
    texts = [ids for text in corpus.files(held_out=True) if len(ids := tokenizer.encode(text).ids) > 2 * tokens]
    prompts = []
    for _ in range(count):
        ids = generator.choice(texts)
        start = generator.randrange(len(ids) - tokens)
        prompts.append(ids[start : start + tokens])
    return prompts
