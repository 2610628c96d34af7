"""The bytes of tokens, from the vocabulary and the tokenizer's decoder; and whether the bytes of a text form whole
characters."""

from __future__ import annotations

import codecs
import contextlib
import json
import re

from tokenizers import Tokenizer as FastTokenizer

SPACE = "\u2581"
"""SentencePiece's character for a space."""

BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""SentencePiece's spelling of a byte, for characters without a token."""


class TokenBytes:
    """The bytes of each token of one tokenizer."""

    def __init__(self, tokenizer: FastTokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special = {token: entry.content for token, entry in added.items() if entry.special}
        decoder = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder is not None else {}
        steps = decoder.get("decoders", [decoder])
        self._kinds = {step.get("type") for step in steps}
        self._spaced = "Metaspace" in self._kinds or {"String": SPACE} in [step.get("pattern") for step in steps]

    def of(self, token: int) -> bytes:
        """Return the bytes of a token; empty for an unknown id. The bytes of a special token are its name, since
        decoding skips it; any other added token passes through the decoder as a piece of text does."""
        if token in self._special:
            return self._special[token].encode()
        piece: str | None = self._tokenizer.id_to_token(token)
        if piece is None:
            return b""
        if "ByteLevel" in self._kinds:
            return _byte_level(piece)
        if "ByteFallback" in self._kinds and (byte := BYTE.fullmatch(piece)):
            return bytes([int(byte[1], 16)])
        return (piece.replace(SPACE, " ") if self._spaced else piece).encode()

    def characters(self) -> Characters:
        """Return the character state at the start of a text."""
        return Characters(self._tokenizer, self._kinds)


class Characters:
    """Tracks whether the tokens of a text so far form whole characters, which no further token can change.

    A byte-level decoder reads the bytes of all tokens as one string, so only an incomplete character at its end can
    still change. A decoder with byte fallback (`<0xE2>`) forms characters from a run of byte tokens only if the whole
    run is valid UTF-8; otherwise each byte becomes a U+FFFD. So no byte is final until a token that is not a byte ends
    the run.
    """

    def __init__(self, tokenizer: FastTokenizer, kinds: set[str]) -> None:
        self._tokenizer = tokenizer
        self._byte_level = "ByteLevel" in kinds
        self._has_fallback = "ByteFallback" in kinds and not self._byte_level
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")  # over the text (byte-level) or the run

    def whole_after(self, token: int) -> bool:
        """Take the next token of the text, which must not be a token that decoding skips. Return True if the characters
        are whole after it."""
        if not (self._byte_level or self._has_fallback):
            return True
        piece = self._tokenizer.id_to_token(token) or ""
        if self._byte_level:
            self._bytes.decode(_byte_level(piece))
            return not self._incomplete
        if byte := BYTE.fullmatch(piece):
            self._bytes.decode(bytes([int(byte[1], 16)]))
            return False
        self._bytes.reset()
        return True

    def is_byte(self, token: int) -> bool:
        """Return True if a token is a byte of a run."""
        return self._has_fallback and BYTE.fullmatch(self._tokenizer.id_to_token(token) or "") is not None

    def left_open(self, run: list[int]) -> tuple[list[int], int]:
        """Return the part of `run` that belongs to an incomplete character, and the number of characters that the
        library makes of its bytes. `run`: the tokens since characters were last whole."""
        count = len(self._incomplete)
        if self._byte_level:
            return run, min(1, count)
        return run[len(run) - count :], count

    @property
    def _incomplete(self) -> bytes:
        """The bytes of the incomplete character at the end."""
        return self._bytes.getstate()[0]


def _byte_level(piece: str) -> bytes:
    """Return the bytes of a token in GPT-2's alphabet, or of its own text if a character is outside the alphabet."""
    with contextlib.suppress(UnicodeEncodeError):
        return piece.translate(_TO_BYTES).encode("latin-1")
    return piece.encode()


def _alphabet() -> dict[str, int]:
    """Return GPT-2's alphabet: character to byte. Printable characters are their own bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


ALPHABET = _alphabet()

_TO_BYTES = {code: ALPHABET.get(chr(code), 0x100) for code in range(0x200)}
"""Translates a token's characters into characters whose Latin-1 code is the byte. A character without a byte becomes
one outside Latin-1."""
