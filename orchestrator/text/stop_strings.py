"""Stop strings: finds the first one in a text that comes piece by piece, and holds back what may become one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from specdec.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Spelt:
    """The effect of a token: the text to show, and the stop string it completed, if any."""

    text: str
    stop: str = ""


class StopStrings:
    """The search for stop strings in one text.

    Stop strings are searched for in the shown text. If they contain the text of a special token, they are also searched
    for in the text with special tokens spelt out (`pass_over`); the client gets the shown part of it.
    """

    def __init__(self, stop: Sequence[str], tokenizer: Tokenizer, unshown: str = "") -> None:
        """`unshown` is the text of another hidden token, special or not."""
        self._stop = tuple(stop)
        self._with_special = tuple(
            text for text in stop if tokenizer.names_special_token(text) or (unshown and unshown in text)
        )
        self._held = ""  # may be the beginning of a stop string; includes texts of special tokens
        self._shown: list[int] = []  # by character of `_held`: 1 if it is shown, else 0

    def add(self, text: str) -> Spelt:
        """Add shown text; return its final part, up to the first stop string."""
        if not self._stop or not text:
            return Spelt(text)
        self._held += text
        self._shown += [1] * len(text)
        return self._search()

    def pass_over(self, text: str) -> Spelt:
        """Add hidden text; return as `add` does."""
        if not self._with_special or not text:
            return Spelt("")
        self._held += text
        self._shown += [0] * len(text)
        return self._search()

    def rest(self) -> str:
        """Return the text held back; called at the end of the text."""
        rest = self._visible()
        self._held, self._shown = "", []
        return rest

    def _search(self) -> Spelt:
        held, visible = self._held, self._visible()
        places = list(accumulate(self._shown, initial=0))  # offset in the shown text, by offset in `_held`
        found = [(at, stop) for stop in self._stop if (at := visible.find(stop)) >= 0]
        found += [(places[at], stop) for stop in self._with_special if (at := held.find(stop)) >= 0]
        if found:
            # The earliest stop string; of two at the same place, the longer. In either case the text ends before it.
            at, stop = min(found, key=lambda pair: (pair[0], -len(pair[1])))
            self._held, self._shown = "", []
            return Spelt(visible[:at], stop)
        begin = len(held) - max((_overlap(held, stop) for stop in self._with_special), default=0)
        if overlap := max(_overlap(visible, stop) for stop in self._stop):
            # The offset in `_held` of the overlap's first character.
            begin = min(begin, places.index(len(visible) - overlap + 1) - 1)
        self._held, self._shown = held[begin:], self._shown[begin:]
        return Spelt(visible[: places[begin]])

    def _visible(self) -> str:
        """Return the shown part of what is held."""
        if not self._with_special:
            return self._held
        return "".join(character for character, is_shown in zip(self._held, self._shown, strict=True) if is_shown)


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
