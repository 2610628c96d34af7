"""Measure the cost of a grammar per step, by the size of the vocabulary.

    python -m bench token-masks [--vocabularies 4096,32768,131072] [--tokenizer FILE]

Byte-level tokenizers of these sizes are trained on the Python files of this installation, or one is read from a
`tokenizer.json`. Texts that match a JSON schema are followed token by token, as in a verifier. It times the next
token's mask, its application to a row of logits, the masks of candidates below the text, and the commit. No model runs.
"""

from __future__ import annotations

import json
import random
import sysconfig
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from bench import markdown
from bench.arguments import limit, parser_of, whole_numbers
from specdec.decoding.processing import barriers
from specdec.grammar.compiler import GrammarCompiler
from specdec.grammar.grammar import Grammar, Kind

END = 0

SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "kind": {"enum": ["function", "class", "module"]},
            "lines": {"type": "integer", "minimum": 0},
            "calls": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["name", "kind", "lines", "calls"],
        "additionalProperties": False,
    },
}

TRAINING_BYTES = 48 << 20
"""Bytes of Python files to train tokenizers on."""

CANDIDATES = 4
"""Length of the chain of candidates below a text; their masks are computed as well."""


def texts() -> Iterator[str]:
    """Yield Python files of this installation, up to TRAINING_BYTES."""
    left = TRAINING_BYTES
    for folder in dict.fromkeys(sysconfig.get_path(name) for name in ("stdlib", "purelib")):
        for file in sorted(Path(folder).rglob("*.py")):
            if left > 0 and file.stat().st_size < 1 << 20:
                left -= file.stat().st_size
                yield file.read_text(errors="replace")


def train(vocabulary: int, file: Path) -> None:
    """Train a tokenizer with at most this number of tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    tokenizer.save(str(file))


def documents(count: int) -> list[str]:
    """Return texts that fit the schema, made of the words of this file."""
    chance = random.Random(5)
    words = sorted({word for word in Path(__file__).read_text().split() if word.isidentifier()})
    return [
        json.dumps(
            [
                {
                    "name": "_".join(chance.sample(words, 2))[:40],
                    "kind": chance.choice(["function", "class", "module"]),
                    "lines": chance.randrange(1000),
                    "calls": chance.sample(words, chance.randrange(4)),
                }
                for _ in range(4)
            ]
        )
        for _ in range(count)
    ]


def follow(file: Path, written: Sequence[str]) -> tuple[int, dict[str, list[float]]]:
    """Follow texts; return the vocabulary's size, and every duration of each operation in seconds."""
    tokenizer = Tokenizer.from_file(str(file))
    vocabulary = tokenizer.get_vocab_size()
    seconds: dict[str, list[float]] = defaultdict(list)
    compiler, grammar = GrammarCompiler(file, vocabulary), Grammar(Kind.JSON_SCHEMA, (json.dumps(SCHEMA),))
    begin = time.perf_counter()
    compiler.compile(Grammar(Kind.REGEX, ("a",)))
    seconds["first grammar"].append(time.perf_counter() - begin)
    begin = time.perf_counter()
    compiled = compiler.compile(grammar)
    seconds["this grammar"].append(time.perf_counter() - begin)
    logits = np.zeros(vocabulary, np.float32)
    for text in written:
        tokens = tokenizer.encode(text, add_special_tokens=False).ids
        state = compiled.begin([], frozenset({END}))
        for place, token in enumerate(tokens):
            for depth in range(1 + min(CANDIDATES, len(tokens) - place)):
                begin = time.perf_counter()
                mask = state.allowed(tokens[place : place + depth])
                seconds["mask of a candidate" if depth else "mask"].append(time.perf_counter() - begin)
            assert mask is not None
            begin = time.perf_counter()
            _ = logits + barriers(mask, vocabulary)
            seconds["use of a mask"].append(time.perf_counter() - begin)
            begin = time.perf_counter()
            state.commit([token])
            seconds["commit of a token"].append(time.perf_counter() - begin)
        state.commit([END])
    return vocabulary, seconds


def main(given: list[str]) -> None:
    parser = parser_of("token-masks", __doc__)
    parser.add_argument(
        "--vocabularies", type=whole_numbers, default=[4096, 32768, 131072], help="maximum tokens of each"
    )
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json, instead of trained ones")
    parser.add_argument("--texts", type=int, default=20, help="number of texts (default: %(default)s)")
    options = parser.parse_args(given)
    limit(parser, options, 1, "vocabularies", "texts")
    print("Microseconds: median and 99th percentile; seconds for grammars.\n", flush=True)
    is_first = True
    with tempfile.TemporaryDirectory() as folder:
        for size in options.vocabularies if options.tokenizer is None else [0]:
            file = options.tokenizer or Path(folder) / f"{size}.json"
            if options.tokenizer is None:
                train(size, file)
            vocabulary, seconds = follow(file, documents(options.texts))
            if is_first:
                is_first = False
                print(markdown.head(["tokens", *seconds]))
            cells = [
                f"{1e6 * median(each):.0f}, {1e6 * float(np.percentile(each, 99)):.0f}"
                if len(each) > 1
                else f"{each[0]:.3f} s"
                for each in seconds.values()
            ]
            print(markdown.row([vocabulary, *cells]), flush=True)
