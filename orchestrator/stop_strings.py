"""Stop strings: where the first one is in a text that comes piece by piece, and what may still become one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from specdec.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Spelt:
    """The effect of a token: readable text, and the stop string that it completed, if any."""

    text: str
    stop: str = ""


class StopStrings:
    """The search for stop strings in one text.

    They are looked for in what the text shows. Those with the whole text of a special token in them are looked for as
    well in the text as it is with special tokens spelt (`pass_over`), of which a client sees what is shown.
    """

    def __init__(self, stop: Sequence[str], tokenizer: Tokenizer, unshown: str = "") -> None:
        """`unshown` is the text of another token that is not shown, special or not."""
        self._stop = tuple(stop)
        self._with_special = tuple(
            text for text in stop if tokenizer.names_special_token(text) or (unshown and unshown in text)
        )
        self._held = ""  # may be the beginning of a stop string; with texts of special tokens
        self._shown: list[int] = []  # of each character of it: 1 if the text shows it, else 0

    def add(self, text: str) -> Spelt:
        """Add what the text shows next; return what is certain of it now, up to the first stop string."""
        if not self._stop or not text:
            return Spelt(text)
        self._held += text
        self._shown += [1] * len(text)
        return self._search()

    def pass_over(self, text: str) -> Spelt:
        """Add what stands here but is not shown, as `add` does."""
        if not self._with_special or not text:
            return Spelt("")
        self._held += text
        self._shown += [0] * len(text)
        return self._search()

    def rest(self) -> str:
        """Return what was held back; called at the end of the text."""
        rest = self._visible()
        self._held, self._shown = "", []
        return rest

    def _search(self) -> Spelt:
        held, visible = self._held, self._visible()
        places = list(accumulate(self._shown, initial=0))  # in what is shown, of each place in what is held
        found = [(at, stop) for stop in self._stop if (at := visible.find(stop)) >= 0]
        found += [(places[at], stop) for stop in self._with_special if (at := held.find(stop)) >= 0]
        if found:
            # The earliest stop string; of two that begin there, the longer. The text ends before it in either case.
            at, stop = min(found, key=lambda pair: (pair[0], -len(pair[1])))
            self._held, self._shown = "", []
            return Spelt(visible[:at], stop)
        begin = len(held) - max((_overlap(held, stop) for stop in self._with_special), default=0)
        if overlap := max(_overlap(visible, stop) for stop in self._stop):
            # Place of a character in what is held: before the place at which one more is shown.
            begin = min(begin, places.index(len(visible) - overlap + 1) - 1)
        self._held, self._shown = held[begin:], self._shown[begin:]
        return Spelt(visible[: places[begin]])

    def _visible(self) -> str:
        """Return what the text shows of what is held."""
        if not self._with_special:
            return self._held
        return "".join(character for character, is_shown in zip(self._held, self._shown, strict=True) if is_shown)


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that is a proper beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
