"""The bytes that a token stands for, read off the vocabulary by the tokenizer's decoder."""

from __future__ import annotations

import contextlib
import json
import re

from tokenizers import Tokenizer as FastTokenizer

SPACE = "\u2581"
"""The character that SentencePiece writes for a space."""

BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""How SentencePiece writes a byte of a character that has no token of its own."""


class TokenBytes:
    """The bytes of each token of one tokenizer."""

    def __init__(self, tokenizer: FastTokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {token: added.content for token, added in tokenizer.get_added_tokens_decoder().items()}
        decoder = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder is not None else {}
        steps = decoder.get("decoders", [decoder])
        self._kinds = {step.get("type") for step in steps}
        self._spaced = "Metaspace" in self._kinds or {"String": SPACE} in [step.get("pattern") for step in steps]

    def of(self, token: int) -> bytes:
        """Return the bytes of a token; none for an id that the tokenizer does not know."""
        if token in self._added:
            return self._added[token].encode()
        piece: str | None = self._tokenizer.id_to_token(token)
        if piece is None:
            return b""
        if "ByteLevel" in self._kinds:
            with contextlib.suppress(UnicodeEncodeError):  # it holds what is no byte
                return piece.translate(_TO_BYTES).encode("latin-1")
        if "ByteFallback" in self._kinds and (byte := BYTE.fullmatch(piece)):
            return bytes([int(byte[1], 16)])
        return (piece.replace(SPACE, " ") if self._spaced else piece).encode()


def _alphabet() -> dict[str, int]:
    """Return GPT-2's alphabet: which byte each character stands for. Printable ones stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


ALPHABET = _alphabet()

_TO_BYTES = {code: ALPHABET.get(chr(code), 0x100) for code in range(0x200)}
"""Translation of a token's characters into those whose Latin-1 code is the byte that each stands for; a character that
stands for none becomes one beyond Latin-1."""
