"""Training texts: files of text as windows of tokens, and the target's own continuations of them."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.engine.model_file import ModelDirectoryError, in_one_line
from specdec.text.tokenizer import ChatTemplateError, Tokenizer

HELD_OUT = 20
"""One window in this many is held out: no step trains on it."""

PROMPT_TOKENS = 32
"""Tokens of a text that the target continues."""

CONTINUED_ROWS = 32
"""Texts continued at a time."""


class TextError(ModelDirectoryError):
    """Raised, with a one-line message, for a file without usable text."""


class Windows:
    """Windows of `length` tokens, in random order; the same seed and number give the same windows. `tokens`: those of
    all windows, one after the other."""

    def __init__(self, tokens: Tensor, length: int) -> None:
        """`tokens`: int64 [n]. TextError if they make fewer than two windows."""
        count = len(tokens) // length
        if count < 2:
            raise TextError(f"the texts have {len(tokens)} tokens, must have at least {2 * length}: two windows")
        self.tokens = tokens[: count * length]
        windows = self.tokens.view(count, length)
        held = torch.arange(count) % HELD_OUT == HELD_OUT - 1 if count >= HELD_OUT else torch.arange(count) == count - 1
        self.trained, self.held_out = windows[~held], windows[held]

    def batch(self, rows: int, seed: int, step: int) -> Tensor:
        """Return `rows` windows to train on, int64 [rows, length]."""
        generator = torch.Generator().manual_seed((seed << 32) + step)
        return self.trained[torch.randint(len(self.trained), (rows,), generator=generator)]


def tokens_of(files: Sequence[Path], tokenizer: Tokenizer, end: int | None) -> Tensor:
    """Return the tokens of files, int64 [n], with the `end` token after each text. A line of a .jsonl file is an object
    with `text`, or with `messages`, which the chat template renders; any other file is one text."""
    ids: list[int] = []
    for file in files:
        for text, special in _texts(file, tokenizer):
            ids += tokenizer.encode(text, special=special)
            if end is not None:
                ids.append(end)
    return torch.tensor(ids, dtype=torch.int64)


def digest_of(files: Sequence[Path]) -> str:
    """Return a digest of files as `tokens_of` reads them: their bytes, kinds and order. TextError if one cannot be
    read."""
    digest = hashlib.sha256()
    for file in files:
        try:
            with file.open("rb") as content:
                digest.update(hashlib.file_digest(content, "sha256").digest())
        except OSError as error:
            raise TextError(f"{file}: cannot be read: {in_one_line(error)}") from None
        digest.update(b"jsonl" if file.suffix == ".jsonl" else b"text")
    return digest.hexdigest()


def _texts(file: Path, tokenizer: Tokenizer) -> Iterator[tuple[str, bool]]:
    """Yield the texts of a file, and whether special tokens are still to be added."""
    try:
        content = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TextError(f"{file}: cannot be read: {in_one_line(error)}") from None
    if file.suffix != ".jsonl":
        yield content, True
        return
    for number, line in enumerate(content.split("\n"), 1):  # JSON may contain what else ends a line
        if not line.strip():
            continue
        try:
            entry: Any = json.loads(line)
        except ValueError as error:
            raise TextError(f"{file}:{number}: is not JSON: {in_one_line(error)}") from None
        if isinstance(entry, dict) and isinstance(entry.get("text"), str):
            yield entry["text"], True
        elif isinstance(entry, dict) and isinstance(entry.get("messages"), list):
            try:
                yield tokenizer.render(entry["messages"], datetime.now(UTC), generation_prompt=False), False
            except ChatTemplateError as error:
                raise TextError(f"{file}:{number}: messages: {error}") from None
        else:
            raise TextError(f"{file}:{number}: has neither text, a string, nor messages, a list")


@torch.inference_mode()
def continued(
    model: PreTrainedModel,
    tokens: Tensor,
    length: int,
    rows: int,
    seed: int,
    *,
    until: float = math.inf,
    wrote: Callable[[int], None] = lambda rows: None,
) -> Tensor:
    """Return `rows` texts of `length` tokens, one after the other, int64 [rows * length]: PROMPT_TOKENS from random
    places of `tokens`, and what the target writes next, in half of the texts greedily, in half sampled at temperature
    0.8. Fewer if `time.monotonic` reaches `until` meanwhile. `wrote` gets the number of texts so far, now and then.

    Heads draft for text that the target writes, which differs from what others wrote.
    """
    generator = torch.Generator().manual_seed(seed)
    found: list[Tensor] = []
    at_once = min(CONTINUED_ROWS, max(1, rows // 2))
    while len(found) * at_once < rows and time.monotonic() < until:
        starts = torch.randint(max(1, len(tokens) - PROMPT_TOKENS), (at_once,), generator=generator)
        prompts = torch.stack([tokens[start : start + PROMPT_TOKENS] for start in starts.tolist()]).to(model.device)
        torch.manual_seed((seed << 32) + len(found))
        sampled = {"do_sample": True, "temperature": 0.8, "top_k": 0} if len(found) % 2 else {"do_sample": False}
        generate: Any = model.generate
        found.append(
            generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                min_new_tokens=length - PROMPT_TOKENS,
                max_new_tokens=length - PROMPT_TOKENS,
                pad_token_id=0,
                **sampled,
            ).cpu()
        )
        wrote(min(rows, len(found) * at_once))
    return torch.cat(found)[:rows].flatten() if found else tokens[:0]
