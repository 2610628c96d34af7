"""Training texts: files of text as windows of tokens, and the target's own continuations of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from copy import copy
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.engine.model_file import ModelDirectoryError, in_one_line
from specdec.text.tokenizer import ChatTemplateError, Tokenizer

HELD_OUT = 20
"""One window in HELD_OUT is held out: no step trains on it."""

PROMPT_TOKENS = 32
"""Length in tokens of a prompt that the target continues."""

CONTINUED_ROWS = 32
"""Texts continued in one batch."""


class TextError(ModelDirectoryError):
    """Raised, with a one-line message, for a file without usable text."""


class Windows:
    """Windows of `length` tokens, drawn at random; the same seed and step give the same windows. Those `held_out` are
    not drawn."""

    def __init__(self, tokens: Tensor, length: int, *, all_held_out: bool = False) -> None:
        """`tokens`: int64 [n]. Raise TextError if they fill fewer than two windows."""
        count = len(tokens) // length
        if count < 2:
            raise TextError(f"the texts have {len(tokens)} tokens, must have at least {2 * length}: two windows")
        windows = tokens[: count * length].view(count, length)
        number = torch.arange(count)
        held = number % HELD_OUT == HELD_OUT - 1 if count >= HELD_OUT else number == count - 1
        held |= all_held_out
        self.trained, self.held_out = windows[~held], windows[held]

    def joined(self, trained: Tensor, held_out: Tensor) -> Windows:
        """Return these windows and further ones, int64 [n, length], to train on and held out."""
        joined = copy(self)
        joined.trained = torch.cat([self.trained, trained])
        joined.held_out = torch.cat([self.held_out, held_out])
        return joined

    def batch(self, rows: int, seed: int, step: int) -> Tensor:
        """Return `rows` windows to train on, int64 [rows, length]."""
        return self.drawn(rows, torch.Generator().manual_seed((seed << 32) + step))

    def drawn(self, rows: int, generator: torch.Generator) -> Tensor:
        """Return `rows` windows to train on, drawn with replacement, int64 [rows, length]."""
        return self.trained[torch.randint(len(self.trained), (rows,), generator=generator)]

    def spread(self, most: int) -> Tensor:
        """Return up to `most` held-out windows, evenly spread, int64 [n, length]."""
        places = torch.linspace(0, len(self.held_out) - 1, min(most, len(self.held_out)))
        return self.held_out[places.long()]


class Mixture:
    """Windows of new text mixed with older ones, so that a model that learns the new text does not forget the old."""

    def __init__(self, new: Windows, old: Windows | None = None, share: float = 0.0) -> None:
        """`share`: expected fraction of older windows in a batch."""
        self.new, self.old = new, old
        self._share = share

    def batch(self, rows: int, seed: int, step: int) -> Tensor:
        """Return `rows` windows to train on, int64 [rows, length]; the same seed and step give the same ones."""
        if self.old is None:
            return self.new.batch(rows, seed, step)
        generator = torch.Generator().manual_seed((seed << 32) + step)
        is_old = torch.rand(rows, 1, generator=generator) < self._share
        return torch.where(is_old, self.old.drawn(rows, generator), self.new.drawn(rows, generator))


def tokens_of(files: Sequence[Path], tokenizer: Tokenizer, end: int | None) -> Tensor:
    """Return the tokens of files, int64 [n], with the `end` token after each text. A line of a .jsonl file is an object
    with `text`, or with `messages` for the chat template; any other file is one text. TextError, naming the file, if it
    cannot be used."""
    ids: list[int] = []
    for file in files:
        for text, special in _texts(file, tokenizer):
            ids += tokenizer.encode(text, special=special)
            if end is not None:
                ids.append(end)
    return torch.tensor(ids, dtype=torch.int64)


def digest_of(files: Sequence[Path]) -> str:
    """Return a digest of files as `tokens_of` reads them: their bytes, kinds and order. Raise TextError if one
    cannot be read."""
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
    """Yield the texts of a file, each with a flag: True if the tokenizer must add special tokens."""
    try:
        content = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TextError(f"{file}: cannot be read: {in_one_line(error)}") from None
    if file.suffix != ".jsonl":
        yield content, True
        return
    for number, line in enumerate(content.split("\n"), 1):  # JSON may contain the other line separators
        if not line.strip():
            continue
        try:
            entry: Any = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise TextError(f"{file}:{number}: is not JSON: {in_one_line(error)}") from None
        if isinstance(entry, dict) and isinstance(entry.get("text"), str):
            text, special = entry["text"], True
        elif isinstance(entry, dict) and isinstance(entry.get("messages"), list):
            try:
                text = tokenizer.render(entry["messages"], datetime.now(UTC), generation_prompt=False)
            except ChatTemplateError as error:
                raise TextError(f"{file}:{number}: messages: {error}") from None
            special = False
        else:
            raise TextError(f"{file}:{number}: has neither text, a string, nor messages, a list")
        try:
            text.encode()
        except UnicodeEncodeError:  # JSON may escape half of a surrogate pair
            raise TextError(f"{file}:{number}: has a lone surrogate, which is no character") from None
        yield text, special


def continuations(
    model: PreTrainedModel, tokens: Tensor, length: int, rows: int, seed: int, *, begin: int = 0
) -> Iterator[Tensor]:
    """Yield `rows` texts in parts, int64 [n, length] each. A text is PROMPT_TOKENS tokens from a random place in
    `tokens`, and the target's continuation: greedy in every other part, else sampled at temperature 0.8. `begin`:
    number of texts that already exist, in whole parts. They are skipped, and the other texts stay the same.

    Heads and drafts guess text that the target writes, which differs from text by other authors.
    """
    at_once = min(CONTINUED_ROWS, max(1, rows // 2))
    generator = torch.Generator().manual_seed(seed)
    for part, written in enumerate(range(0, rows, at_once)):
        starts = torch.randint(max(1, len(tokens) - PROMPT_TOKENS), (at_once,), generator=generator).tolist()
        if written < begin:
            continue
        prompts = torch.stack([tokens[start : start + PROMPT_TOKENS] for start in starts]).to(model.device)
        torch.manual_seed((seed << 32) + part)
        sampled = {"do_sample": True, "temperature": 0.8, "top_k": 0} if part % 2 else {"do_sample": False}
        generate: Any = model.generate
        with torch.inference_mode():
            texts = generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                min_new_tokens=length - PROMPT_TOKENS,
                max_new_tokens=length - PROMPT_TOKENS,
                pad_token_id=0,
                **sampled,
            )
        yield texts[: rows - written].cpu().clone()  # autograd rejects tensors made in inference mode
