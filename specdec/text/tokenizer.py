"""The tokenizer: text to tokens and back, with the target model's own tokenizer and chat template, without torch."""

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

import tokenizers
from tokenizers import Tokenizer as FastTokenizer

from specdec.engine.added_tokens import AddedToken
from specdec.engine.model_directory import ModelDirectory
from specdec.engine.model_file import Fields, ModelDirectoryError, in_one_line
from specdec.text.chat_template import RESERVED, templates_of
from specdec.text.special_tokens import special_tokens
from specdec.text.token_bytes import Characters, TokenBytes


def add(tokenizer: tokenizers.Tokenizer, tokens: Sequence[AddedToken]) -> None:
    """Add tokens to a tokenizer; an existing token gets the new flags."""
    if tokens:
        tokenizer.add_tokens([tokenizers.AddedToken(**asdict(token)) for token in tokens])


TOKENIZER = "tokenizer.json"

REMEMBERED_WORDS = 1000
"""Size of the word cache of each encoding thread. The library's default of 10,000 takes 5 MB per thread, or 75 MB with
long words. Without a cache, encoding a text takes two thirds longer (docs/decisions/2026-11-24-what-grows.md)."""


class ChatTemplateError(Exception):
    """The conversation cannot be rendered."""


SPARSE = 8
"""A text with more characters than this per allowed token is first counted in pieces; prose has four per token."""

PIECE = 1 << 16
"""Characters of such a piece."""


class TooManyTokensError(Exception):
    """A text exceeds its token limit; the message gives its number of tokens, or a lower bound."""


class Tokenizer:
    """The tokenizer of a model directory."""

    def __init__(self, directory: ModelDirectory, chat_template: Path | None = None) -> None:
        """`chat_template`: a file that replaces the model's own templates."""
        adding = directory.tokenizer_files.to_add()
        self._tokenizer = _loaded(directory.path / TOKENIZER, adding)
        resize_cache: Callable[[int], None] | None = getattr(self._tokenizer.model, "_resize_cache", None)
        if resize_cache is not None:  # BPE and Unigram cache words
            resize_cache(REMEMBERED_WORDS)
        settings = Fields(directory.path / "tokenizer_config.json", directory.tokenizer_config)
        self._special = special_tokens(directory)
        added = self._tokenizer.get_added_tokens_decoder()
        self._added_ids = {entry.content: token for token, entry in added.items()}
        self._special_ids = {entry.content: token for token, entry in added.items() if entry.special}
        self.chat_templates = templates_of(directory.path, settings, chat_template)
        """The chat templates; None if there are none."""
        sources = None if self.chat_templates is None else self.chat_templates.sources
        decides = hashlib.sha256((directory.path / TOKENIZER).read_bytes())
        decides.update(json.dumps([self._special, sources], sort_keys=True).encode())
        if adding:
            decides.update(json.dumps([asdict(token) for token in adding]).encode())
        self.fingerprint = decides.hexdigest()
        """SHA-256, in hex, of everything that determines the tokens of a text or conversation."""

    def special_token(self, text: str) -> int | None:
        """Return the special token with this text, which decoding skips; None if there is none."""
        return self._special_ids.get(text)

    def added_token(self, text: str) -> int | None:
        """Return the added token with this text, special or not; None if there is none."""
        return self._added_ids.get(text)

    @property
    def size(self) -> int:
        """The number of tokens."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def is_spelt(self, token: int, *, special: bool = False) -> bool:
        """Return True if decoded texts include a token: it is known, and either not special or included by
        `special`."""
        return (special or token not in self.special_tokens) and self._tokenizer.id_to_token(token) is not None

    def names_special_token(self, text: str) -> bool:
        """Return True if this text contains a special token's text."""
        return self._special_texts is not None and self._special_texts.search(text) is not None

    @cached_property
    def special_tokens(self) -> frozenset[int]:
        """The special tokens, which decoding skips."""
        return frozenset(self._special_ids.values())

    @cached_property
    def _special_texts(self) -> re.Pattern[str] | None:
        return re.compile("|".join(map(re.escape, self._special_ids))) if self._special_ids else None

    def characters(self) -> Characters:
        """Return the character state at the start of a text."""
        return self._bytes.characters()

    @cached_property
    def longest_token(self) -> int:
        """Upper bound on the bytes of a single token, except for white space absorbed by a special token and text that
        the model has no tokens for."""
        return max(len(piece.encode()) for piece in self._tokenizer.get_vocab(with_added_tokens=True))

    def encode(self, text: str, *, special: bool = True, limit: int | None = None) -> list[int]:
        """Return token ids; `special` adds the tokens that the model expects around a plain prompt (a BOS token, for
        example). TooManyTokensError if there are more than `limit`.

        `encode_batch_fast` releases the GIL; `encode` would hold it (tokenizers 0.23: for three seconds with a text of
        3 MB).
        """
        if limit is not None and len(text) > SPARSE * limit:
            self._count_in_pieces(text, 2 * limit)
        (encoding,) = self._library(self._tokenizer.encode_batch_fast, [text], add_special_tokens=special)
        if limit is not None and len(encoding) > limit:
            raise TooManyTokensError(f"{len(encoding)} tokens")
        return list(encoding.ids)

    def _count_in_pieces(self, text: str, limit: int) -> None:
        """Raise TooManyTokensError as soon as the pieces of a text have more than `limit` tokens. Cutting a text adds
        only a few tokens. Encoding millions of tokens in one call would take a gigabyte of memory and keep it."""
        count = 0
        for start in range(0, len(text), PIECE):
            piece = text[start : start + PIECE]
            (encoding,) = self._library(self._tokenizer.encode_batch_fast, [piece], add_special_tokens=False)
            count += len(encoding)
            if count > limit:
                raise TooManyTokensError(f"more than {limit} tokens")

    def piece(self, token: int) -> bytes:
        """Return the bytes of a token."""
        return self._bytes.of(token)

    @cached_property
    def _bytes(self) -> TokenBytes:
        return TokenBytes(self._tokenizer)

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Return the text of tokens; with `special`, including special tokens."""
        return str(self._library(self._tokenizer.decode, list(tokens), skip_special_tokens=not special))

    @staticmethod
    def _library(function: Callable[..., Any], *values: Any, **options: Any) -> Any:
        """Call the library; RuntimeError if it panics: a panic is not an Exception, and no handler would catch it."""
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
        *,
        generation_prompt: bool = True,
        continues: bool = False,
    ) -> str:
        """Render a conversation as the prompt text of the assistant's next turn, or of the rest of the last message if
        the text `continues` it. `generation_prompt`: end with the template's start of that turn. `messages` have a
        `role`, a `content`, and optional fields for calls. `time` is the only clock that the template sees. `arguments`
        are further variables. ChatTemplateError if the model has no template, if an argument has the name of a built-in
        variable or a special token, or if the template fails."""
        if self.chat_templates is None:
            raise ChatTemplateError("the model has no chat template")
        for name in arguments:
            if name in self._special or name in RESERVED:
                raise ChatTemplateError(f"{name!r} cannot be set by an argument of the template")
        try:
            return self.chat_templates.render(
                messages,
                time,
                self._special | dict(arguments),
                tools,
                generation_prompt=generation_prompt,
                continues=continues,
            )
        except Exception as error:  # a template is a program: it may raise anything
            raise ChatTemplateError(f"the model's chat template failed: {error}") from error


def _loaded(file: Path, adding: Sequence[AddedToken]) -> FastTokenizer:
    """Load the library's tokenizer, add tokens from other files, and test it, because even a valid file may make it
    panic on any text."""
    try:
        with _stderr_silenced():  # a panic prints its own lines
            tokenizer = FastTokenizer.from_file(str(file))
            # Truncation and padding settings left over from training must not change prompts.
            tokenizer.no_truncation()
            tokenizer.no_padding()
            add(tokenizer, adding)
            with suppress(Exception):  # an error, unlike a panic, may concern this text only
                tokenizer.decode(tokenizer.encode("A trial, of 1 line.\n").ids)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # panics are not Exceptions
        raise ModelDirectoryError(f"{file}: cannot be used: {in_one_line(error)}") from error
    return tokenizer


@contextmanager
def _stderr_silenced() -> Iterator[None]:
    """Discard everything written to stderr, by native code too."""
    try:
        stderr = os.dup(2)
    except OSError:  # stderr is closed
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
