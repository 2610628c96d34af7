"""Prompts from text that the demo pair has not seen: the held-out source files.

`held_out` takes prompts from any place in a file; `of_kind` makes several kinds. Code prompts begin at any line of a
file; prose prompts are docstrings. Editing prompts show a piece of code and then its beginning with one name changed,
as in an assistant's answer to a request for a small correction. Chat prompts consist of answered questions about
functions and a new question. MIXED takes these kinds in turn.
"""

from __future__ import annotations

import ast
import random
import re
from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import cycle, islice
from pathlib import Path

from tokenizers import Tokenizer

from demo import corpus

MIXED = "mixed"
"""The kind that takes all other kinds of prompts in turn."""
SHOWN = 0.6
"""Fraction of an editing prompt that the original code takes."""
TOKENIZER = Path(__file__).parent / "target" / "tokenizer.json"


def held_out(count: int, tokens: int = 96, seed: int = 0) -> list[list[int]]:
    """Return `count` prompts of `tokens` token ids each, from random places of held-out files."""
    generator = random.Random(seed)
    texts = [ids for ids in _encoded() if len(ids) > 2 * tokens]
    prompts = []
    for _ in range(count):
        ids = generator.choice(texts)
        start = generator.randrange(len(ids) - tokens)
        prompts.append(ids[start : start + tokens])
    return prompts


def of_kind(kind: str, count: int, tokens: int, tokenizer: Path, seed: int = 0) -> list[list[int]]:
    """Return `count` prompts of `tokens` token ids each, of a kind in KINDS, or of all kinds in turn for MIXED."""
    encode = Tokenizer.from_file(str(tokenizer)).encode
    kinds = cycle(KINDS) if kind == MIXED else cycle([kind])
    generator = random.Random(f"{kind} {seed}")
    return [KINDS[name](generator, tokens, lambda text: list(encode(text).ids)) for name in islice(kinds, count)]


Encode = Callable[[str], list[int]]


def _code(generator: random.Random, tokens: int, encode: Encode) -> list[int]:
    while True:
        lines = generator.choice(corpus.files(held_out=True)).splitlines(keepends=True)
        ids = encode("".join(lines[generator.randrange(len(lines)) :][: 2 * tokens]))
        if len(ids) >= tokens:
            return ids[:tokens]


def _prose(generator: random.Random, tokens: int, encode: Encode) -> list[int]:
    start, said, ids = generator.randrange(len(_documented())), "", list[int]()
    for _, docstring in islice(cycle(_documented()), start, None):
        said += docstring + "\n\n"
        ids = encode(said)
        if len(ids) >= tokens:
            break
    return ids[:tokens]


def _editing(generator: random.Random, tokens: int, encode: Encode) -> list[int]:
    while True:
        lines = generator.choice(corpus.files(held_out=True)).splitlines(keepends=True)
        start, shown = generator.randrange(len(lines)), ""
        for line in lines[start:]:
            if len(encode(shown + line)) > SHOWN * tokens:
                break
            shown += line
        names = Counter(re.findall(r"\b[a-z_]{4,}\b", shown))
        if not names:
            continue
        name, _ = names.most_common(1)[0]
        before = encode(f"# Before:\n{shown}# After, with {name} renamed:\n")
        after = encode(re.sub(rf"\b{name}\b", f"new_{name}", shown))
        if len(before) < tokens <= len(before) + len(after) // 2:
            return (before + after)[:tokens]


def _chat(generator: random.Random, tokens: int, encode: Encode) -> list[int]:
    asked, ids = "Q: What does {} do?\nA:", list[int]()
    said = asked.format(generator.choice(_documented())[0])
    while len(ids) < tokens:
        name, docstring = generator.choice(_documented())
        said = f"{asked.format(name)} {docstring.splitlines()[0]}\n\n{said}"
        ids = encode(said)
    return ids[-tokens:]


KINDS = {"code": _code, "prose": _prose, "editing": _editing, "chat": _chat}


@cache
def _encoded() -> list[list[int]]:
    """Return the token ids of the held-out files."""
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    return [tokenizer.encode(text).ids for text in corpus.files(held_out=True)]


@cache
def _documented() -> list[tuple[str, str]]:
    """Return (name, docstring) of the definitions whose docstring has more than 40 characters."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    trees = map(ast.parse, corpus.files(held_out=True))
    nodes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, kinds))
    documented = ((node.name, ast.get_docstring(node)) for node in nodes)
    return [(name, said) for name, said in documented if said and len(said) > 40]
