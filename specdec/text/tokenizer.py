"""The tokenizer: text to tokens and back, by the target model's own tokenizer and chat template, without torch."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import datetime
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from specdec.engine.added_tokens import AddedToken
from specdec.engine.model_directory import ModelDirectory, ModelDirectoryError
from specdec.engine.model_file import Fields, in_one_line
from specdec.text.added_tokens import add
from specdec.text.chat_template import RESERVED, templates_of
from specdec.text.special_tokens import special_tokens
from specdec.text.token_bytes import Characters, TokenBytes

TOKENIZER = "tokenizer.json"

REMEMBERED_WORDS = 1000
"""Words whose tokens each thread that encodes remembers. The library's own 10,000 take 5 MB a thread, or 75 MB if they
are long; without any, encoding a text takes two thirds longer (docs/decisions/2026-11-24-what-grows.md)."""


class ChatTemplateError(Exception):
    """The conversation cannot be rendered."""


SPARSE = 8
"""Characters for each token that a text may have, above which its tokens are first counted in pieces; prose has
four."""

PIECE = 1 << 16
"""Characters of such a piece."""


class TooManyTokensError(Exception):
    """A text has more tokens than it may; the message says how many."""


class Tokenizer:
    """The tokenizer of a model directory."""

    def __init__(self, directory: ModelDirectory) -> None:
        adding = directory.tokenizer_files.to_add()
        self._tokenizer = _loaded(directory.path / TOKENIZER, adding)
        resize_cache: Callable[[int], None] | None = getattr(self._tokenizer.model, "_resize_cache", None)
        if resize_cache is not None:  # BPE and Unigram remember words
            resize_cache(REMEMBERED_WORDS)
        settings = Fields(directory.path / "tokenizer_config.json", directory.tokenizer_config)
        self._special = special_tokens(directory)
        added = self._tokenizer.get_added_tokens_decoder()
        self._added_ids = {each.content: token for token, each in added.items()}
        self._special_ids = {each.content: token for token, each in added.items() if each.special}
        self.chat_templates = templates_of(directory.path, settings)
        """The chat templates; None if there is none."""
        sources = None if self.chat_templates is None else self.chat_templates.sources
        decides = hashlib.sha256((directory.path / TOKENIZER).read_bytes())
        decides.update(json.dumps([self._special, sources], sort_keys=True).encode())
        if adding:
            decides.update(json.dumps([asdict(token) for token in adding]).encode())
        self.fingerprint = decides.hexdigest()
        """SHA-256, in hex, over all that decides which tokens a text or a conversation becomes."""

    def special_token(self, text: str) -> int | None:
        """Return the special token with this text, which texts do not show; None if it is none."""
        return self._special_ids.get(text)

    def added_token(self, text: str) -> int | None:
        """Return the token that always stands for this text, special or not; None if there is none."""
        return self._added_ids.get(text)

    @property
    def size(self) -> int:
        """The number of its tokens."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def is_spelt(self, token: int) -> bool:
        """Return whether texts show a token: it is known, and not special."""
        return token not in self._special_tokens and self._tokenizer.id_to_token(token) is not None

    def names_special_token(self, text: str) -> bool:
        """Return whether the text of a special token is part of this text."""
        return self._special_texts is not None and self._special_texts.search(text) is not None

    @cached_property
    def _special_tokens(self) -> frozenset[int]:
        return frozenset(self._special_ids.values())

    @cached_property
    def _special_texts(self) -> re.Pattern[str] | None:
        return re.compile("|".join(map(re.escape, self._special_ids))) if self._special_ids else None

    def characters(self) -> Characters:
        """Return the state of the characters of a text that begins."""
        return self._bytes.characters()

    @cached_property
    def longest_token(self) -> int:
        """Bytes that one token can stand for at most (except for white space that a special token swallows, and for
        what the model has no tokens for)."""
        return max(len(piece.encode()) for piece in self._tokenizer.get_vocab(with_added_tokens=True))

    def encode(self, text: str, *, special: bool = True, limit: int | None = None) -> list[int]:
        """Return token ids; `special` adds what the model expects around a plain prompt (a BOS token, say). With more
        than `limit` of them, raise TooManyTokensError.

        Other threads run meanwhile: `encode_batch_fast` releases the interpreter, `encode` would not (tokenizers 0.23:
        a text of 3 MB held it for three seconds).
        """
        if limit is not None and len(text) > SPARSE * limit:
            self._count_in_pieces(text, 2 * limit)
        (encoding,) = self._library(self._tokenizer.encode_batch_fast, [text], add_special_tokens=special)
        if limit is not None and len(encoding) > limit:
            raise TooManyTokensError(f"{len(encoding)} tokens")
        return list(encoding.ids)

    def _count_in_pieces(self, text: str, limit: int) -> None:
        """Raise TooManyTokensError as soon as the pieces of a text have more than `limit` tokens. Cutting a text adds a
        few tokens; encoded as a whole, a text of millions of tokens would take a gigabyte, and leave it taken."""
        count = 0
        for start in range(0, len(text), PIECE):
            piece = text[start : start + PIECE]
            (encoding,) = self._library(self._tokenizer.encode_batch_fast, [piece], add_special_tokens=False)
            count += len(encoding)
            if count > limit:
                raise TooManyTokensError(f"more than {limit} tokens")

    def piece(self, token: int) -> bytes:
        """Return the bytes that a token stands for."""
        return self._bytes.of(token)

    @cached_property
    def _bytes(self) -> TokenBytes:
        return TokenBytes(self._tokenizer)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._library(self._tokenizer.decode, list(tokens), skip_special_tokens=True))

    @staticmethod
    def _library(function: Callable[..., Any], *values: Any, **options: Any) -> Any:
        """Call the library, and raise RuntimeError if it panics: its panics are no Exceptions, and no handler would
        answer them."""
        try:
            return function(*values, **options)
        except BaseException as error:
            if type(error).__name__ == "PanicException":
                raise RuntimeError(f"the tokenizer panicked: {in_one_line(error)}") from None
            raise

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        time: datetime,
        arguments: Mapping[str, Any] = MappingProxyType({}),
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Render a conversation as the prompt text of the assistant's next turn. `messages` have a `role` and a
        `content`, and what else templates read of calls. `time` is the only clock that the template sees. `arguments`
        are further variables; ChatTemplateError if one has the name of what every template gets, or the template
        fails."""
        if self.chat_templates is None:
            raise ChatTemplateError("the model has no chat template")
        for name in arguments:
            if name in self._special or name in RESERVED:
                raise ChatTemplateError(f"{name!r} cannot be set by an argument of the template")
        try:
            return self.chat_templates.render(messages, time, self._special | dict(arguments), tools)
        except Exception as error:  # a template is a program: it may raise anything
            raise ChatTemplateError(f"the model's chat template says: {error}") from error


def _loaded(file: Path, adding: Sequence[AddedToken]) -> FastTokenizer:
    """Load the library's tokenizer, add what other files say, and try it: a file that it accepts may still make it
    panic over any text."""
    try:
        with _stderr_silenced():  # a panic prints lines of its own
            tokenizer = FastTokenizer.from_file(str(file))
            # What a training run left in the file must not shorten a prompt.
            tokenizer.no_truncation()
            tokenizer.no_padding()
            add(tokenizer, adding)
            with suppress(Exception):  # an error, unlike a panic, is about this text: not every vocabulary spells it
                tokenizer.decode(tokenizer.encode("A trial, of 1 line.\n").ids)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises bare Exception, and panics are no Exception at all
        raise ModelDirectoryError(f"{file}: cannot be used: {in_one_line(error)}") from error
    return tokenizer


@contextmanager
def _stderr_silenced() -> Iterator[None]:
    """Drop what anybody writes to stderr, native code included."""
    try:
        stderr = os.dup(2)
    except OSError:  # it is closed
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nowhere)
