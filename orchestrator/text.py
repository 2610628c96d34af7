"""Detokenisation: turns tokens into text as they come, whole characters only, and nothing past a stop string.

The result is a pure function of the token sequence, however it was cut into pieces: a request that is resumed replays
its generated tokens here, and goes on exactly where the text broke off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.text.tokenizer import Tokenizer

INCOMPLETE = "\ufffd"
"""Character that a tokenizer makes of the first bytes of an incomplete one."""


MOST_PENDING = 8
"""Tokens that are held back at most: no character has so many, so that what is still incomplete then was never one."""


class Detokenizer:
    """An incremental decoder. It decodes a short window of earlier tokens as well, because what a token spells depends
    on its neighbours (a leading space, a byte of a longer character)."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], shown: frozenset[int] = frozenset()) -> None:
        """`shown` are special tokens that are spelt, as no others are."""
        self._tokenizer = tokenizer
        self._shown = shown
        self._window = list(prompt[-8:])  # decoded before; gives context
        self._pending: list[int] = []  # not yet spelt
        while self._window and tokenizer.decode(self._window).endswith(INCOMPLETE) and len(self._pending) < 4:
            self._pending.insert(0, self._window.pop())  # the prompt ends inside a character
        self._window_text = tokenizer.decode(self._window)

    def push(self, token: int) -> str:
        """Return the text that this token completes; empty while a character is incomplete."""
        if token in self._shown:
            text = self.flush() + self._tokenizer.piece(token).decode(errors="replace")
            self._window, self._pending, self._window_text = [], [], ""
            return text
        self._pending.append(token)
        text = self._tokenizer.decode(self._window + self._pending)
        incomplete = text.endswith(INCOMPLETE) and len(self._pending) < MOST_PENDING
        if len(text) <= len(self._window_text):
            if len(self._pending) >= MOST_PENDING:
                self._pending.clear()  # they spell nothing, whatever follows: special tokens
            return ""
        if incomplete:
            return ""
        return self._turn(text)

    def flush(self) -> str:
        """Return what is left at the end, incomplete or not."""
        if not self._pending:
            return ""
        return self._turn(self._tokenizer.decode(self._window + self._pending))

    def _turn(self, text: str) -> str:
        new = text[len(self._window_text) :]
        self._window, self._pending = self._pending, []
        self._window_text = self._tokenizer.decode(self._window)
        return new


@dataclass(frozen=True)
class Spelt:
    """The effect of a token: readable text, and the stop string that it completed, if any."""

    text: str
    stop: str = ""


class TextStream:
    """The detokenizer and stop strings of one sample."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        stop: Sequence[str],
        shown: frozenset[int] = frozenset(),
        *,
        behind_mark: bool = False,
    ) -> None:
        """White space at the beginning is dropped `behind_mark`."""
        self._drops_space = behind_mark
        self._detokenizer = Detokenizer(tokenizer, prompt, shown)
        self._stop = tuple(stop)
        self._held = ""  # may be the beginning of a stop string

    def push(self, token: int) -> Spelt:
        return self._release(self._detokenizer.push(token))

    def finish(self) -> Spelt:
        """Return what was held back; called at the end of the tokens."""
        spelt = self._release(self._detokenizer.flush())
        if spelt.stop:
            return spelt
        held, self._held = self._held, ""
        return Spelt(spelt.text + held)

    def _release(self, new: str) -> Spelt:
        if self._drops_space:
            new = new.lstrip()
            self._drops_space = not new
        if not self._stop:
            return Spelt(new)
        if not new:
            return Spelt("")
        text = self._held + new
        found = [(at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            # The earliest stop string; of two that begin there, the longer. The text ends before it in either case.
            at, stop = min(found, key=lambda pair: (pair[0], -len(pair[1])))
            self._held = ""
            return Spelt(text[:at], stop)
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return Spelt(text[: len(text) - keep])


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that is a proper beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
