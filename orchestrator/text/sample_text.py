"""The text of one sample, made from tokens as they arrive: its reasoning, if it has any, then its answer.

The text consists of whole characters and ends at the first stop string; a possible beginning of a stop string is held
back. The text depends on the token sequence only, not on its split into commits: a resumed request replays its
generated tokens here, and continues exactly where the text broke off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.requests.sample import Sample
from specdec.text.tokenizer import Tokenizer
from specdec.wire.overlap import overlap

CONTEXT = 8
"""Number of earlier tokens decoded together with new ones: some tokens have another text at the beginning."""

SEARCHED = 4096
"""Tokens at the end of a prompt that are searched for this context. Special tokens and single bytes of characters do
not count towards the context's length."""


class Detokenizer:
    """An incremental decoder: joined, its pieces equal the library's decoding of all tokens together, and no piece
    changes later. Tokens are held back until they make whole characters (`Characters`); special tokens are skipped."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        shown: frozenset[int] = frozenset(),
        *,
        special: bool = False,
    ) -> None:
        """`shown` are the special tokens to spell; the text after each is decoded on its own. With `special`, all
        special tokens are spelt, as the library does. If the prompt ends inside a character, the text begins with that
        character."""
        self._tokenizer = tokenizer
        self._shown = frozenset() if special else shown
        self._special = special
        self._characters = tokenizer.characters()
        context: list[int] = []
        found = whole = 0
        for token in reversed(prompt[-SEARCHED:]):
            if tokenizer.is_spelt(token, special=special):
                context.append(token)
                found += not self._characters.is_byte(token)
                if found == CONTEXT:
                    break
        context.reverse()
        for count, token in enumerate(context, 1):
            if self._characters.whole_after(token):
                whole = count
        self._context = context[:whole]  # ends with a whole character
        if context and not whole:  # only bytes, whose text later ones may change: any other text keeps a leading space
            self._context = tokenizer.encode("a", special=False)
        self._pending, broken = self._characters.left_open(context[whole:])  # not yet spelt
        self._spelt = len(self._decode(self._context + self._pending)) - broken  # leading characters not to return

    def push(self, token: int) -> str:
        """Return the text this token completes; empty while a character is incomplete."""
        if token in self._shown:
            text = self.flush() + self._tokenizer.piece(token).decode(errors="replace")
            self._characters = self._tokenizer.characters()
            self._context, self._spelt = [], 0
            return text
        if not self._tokenizer.is_spelt(token, special=self._special):
            return ""
        self._pending.append(token)
        return self._spell() if self._characters.whole_after(token) else ""

    def flush(self) -> str:
        """Return the rest at the end, complete characters or not."""
        return self._spell() if self._pending else ""

    def _spell(self) -> str:
        """Return the text of the pending tokens after their context, and make them the context."""
        new = self._decode(self._context + self._pending)[self._spelt :]
        if new or not self._spelt:
            # Tokens that spell nothing alone (a space dropped at the beginning) cannot serve as context.
            alone = self._decode(self._pending[-CONTEXT:])
            self._context = (self._pending if alone else self._context + self._pending)[-CONTEXT:]
            self._spelt = len(alone or self._decode(self._context))
        self._pending = []
        return new

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, special=self._special)


class TextStream:
    """The detokenizer and stop strings of a sample's reasoning or answer."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        stop: Sequence[str],
        shown: frozenset[int] = frozenset(),
        *,
        special: bool = False,
        mark: int | None = None,
        drops_space: bool = False,
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """`shown` and `special` are the Detokenizer's. `mark` is a hidden token before the text. With `drops_space`,
        white space at the beginning is dropped; with `include_stop`, the text includes the stop string or the end
        token. No stop string that ends within the first `min_tokens` tokens ends the text."""
        self._tokenizer = tokenizer
        self._drops_space = drops_space
        self._detokenizer = Detokenizer(tokenizer, prompt, shown, special=special)
        self._shown = shown
        self._special = special
        unshown = "" if mark is None else self._text_of(mark)
        self._include_stop = include_stop
        self._stop = StopStrings(stop, tokenizer, unshown, include_stop=include_stop)
        self._stop.pass_over(unshown)
        self._early = min_tokens  # further tokens in which no stop string may end

    def push(self, token: int) -> Spelt:
        self._count()
        spelt = self._release(self._detokenizer.push(token))
        return spelt if spelt.stop or self.shows(token) else self._pass_over(token, spelt.text)

    def shows(self, token: int) -> bool:
        """Return True if the text includes this token."""
        return token in self._shown or self._tokenizer.is_spelt(token, special=self._special)

    def end(self, token: int) -> Spelt:
        """Return the text held back before the end token. Without `include_stop` the token is hidden, but may complete
        a stop string."""
        if self._include_stop:
            return self.push(token)
        self._count()
        spelt = self._release(self._detokenizer.flush())
        return spelt if spelt.stop else self._pass_over(token, spelt.text)

    def finish(self) -> Spelt:
        """Return the text held back; called after the last token."""
        spelt = self._release(self._detokenizer.flush())
        return spelt if spelt.stop else Spelt(spelt.text + self._stop.rest())

    def _count(self) -> None:
        """Count the next token."""
        self._stop.early = self._early > 0
        self._early -= 1

    def _pass_over(self, token: int, before: str) -> Spelt:
        spelt = self._stop.pass_over(self._text_of(token))
        return Spelt(before + spelt.text, spelt.stop)

    def _release(self, new: str) -> Spelt:
        if self._drops_space and new:
            left = new.lstrip()
            self._drops_space = not left
            if (spelt := self._stop.pass_over(new[: len(new) - len(left)])).stop:
                return spelt
            new = left
        return self._stop.add(new)

    def _text_of(self, token: int) -> str:
        return self._tokenizer.piece(token).decode(errors="replace")


@dataclass(frozen=True)
class Spelt:
    """The effect of a token: the text to show, and the stop string it completed, if any."""

    text: str
    stop: str = ""


class StopStrings:
    """The search for stop strings in one text.

    Stop strings are searched for in the shown text. Those that contain the text of a special token are also searched
    for in the text with special tokens spelt out (`pass_over`); the client gets only the shown part.
    """

    def __init__(
        self, stop: Sequence[str], tokenizer: Tokenizer, unshown: str = "", *, include_stop: bool = False
    ) -> None:
        """`unshown` is the text of a hidden token before the text, special or not. With `include_stop`, the text
        includes the stop string."""
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._with_special = tuple(
            text for text in stop if tokenizer.names_special_token(text) or (unshown and unshown in text)
        )
        self.early = False
        """True while added text may not end a stop string (`min_tokens`)."""
        self._early_held = self._early_spelt = 0  # leading characters of `_held` and `_spelt` in which none may end
        self._held = ""  # shown text that may be the beginning of a stop string
        self._spelt = ""  # the end of the text with special tokens: may be the beginning of one with a special token
        self._is_shown: list[int] = []  # by character of `_spelt`: 1 if it is shown, else 0

    def add(self, text: str) -> Spelt:
        """Add shown text; return the text that is now final, up to the first stop string."""
        if not self._stop or not text:
            return Spelt(text)
        self._held += text
        return self._search(text, 1)

    def pass_over(self, text: str) -> Spelt:
        """Add hidden text; return as `add` does."""
        return self._search(text, 0) if self._with_special and text else Spelt("")

    def rest(self) -> str:
        """Return the text held back; called at the end of the text."""
        rest, self._held, self._spelt, self._is_shown = self._held, "", "", []
        return rest

    def _search(self, added: str, is_shown: int) -> Spelt:
        held = self._held
        if self._with_special:
            self._spelt += added
            self._is_shown += [is_shown] * len(added)
        if self.early:
            self._early_held, self._early_spelt = len(held), len(self._spelt)
        found = [(at, stop) for stop in self._stop if (at := _find(held, stop, self._early_held)) >= 0]
        if self._with_special:
            places = [(_find(self._spelt, stop, self._early_spelt), stop) for stop in self._with_special]
            found += [(len(held) - sum(self._is_shown[at:]), stop) for at, stop in places if at >= 0]
        if found:
            # The earliest stop string; the longer of two at the same place.
            at, stop = min(found, key=lambda pair: (pair[0], -len(pair[1])))
            self.rest()
            return Spelt(held[:at] + (stop if self._include_stop else ""), stop)
        spelt = len(self._spelt) - max((overlap(self._spelt, stop) for stop in self._with_special), default=0)
        self._spelt, self._is_shown = self._spelt[spelt:], self._is_shown[spelt:]
        final = len(held) - max(sum(self._is_shown), *(overlap(held, stop) for stop in self._stop))
        self._held = held[final:]
        self._early_held, self._early_spelt = max(0, self._early_held - final), max(0, self._early_spelt - spelt)
        return Spelt(held[:final])


def _find(text: str, stop: str, early: int) -> int:
    """Return the place of a stop string that ends after the first `early` characters; -1 if there is none."""
    return text.find(stop, max(0, early - len(stop) + 1))


MAX_SPACE_BEFORE_MARK = 8
"""Maximum tokens of white space before the mark that opens reasoning. Models write one or two line breaks at most. The
client gets these tokens only with the next one."""


class SampleText:
    """Detokenises one sample. Marks of reasoning are not shown; stop strings are searched for only in the answer. White
    space around the opening mark and after the closing one is dropped. With a grammar, the answer keeps its white
    space, and the text has reasoning only if its first token is the opening mark: any other beginning is the answer."""

    def __init__(self, sample: Sample, tokenizer: Tokenizer) -> None:
        self._sample = sample
        self._tokenizer = tokenizer
        self.reasoning_tokens = 0
        """Tokens of the reasoning so far, including its marks."""
        reasoning = sample.reasoning
        # The opening mark, while it may still come: only white space may precede it.
        self._opening = None if reasoning is None or reasoning.begun else reasoning.opening
        self._closing = reasoning.closing if reasoning is not None and reasoning.begun else None  # set within reasoning
        self._stream = self._answer(sample.prompt) if self._closing is None else self._thought(sample.prompt)
        self._ending = {
            token: stop
            for stop in sample.stop
            if (token := tokenizer.added_token(stop)) is not None and token in sample.end_tokens
        }

    def take_space(self, tokens: Sequence[int]) -> int | None:
        """Take the white space before the opening mark, if these tokens continue with the mark; return its number of
        tokens, 0 if no mark follows. Return None, without taking anything, if only later tokens can decide; the caller
        then asks again with more tokens."""
        if self._opening is None:
            return 0
        most = 0 if self._sample.grammar is not None else MAX_SPACE_BEFORE_MARK
        for count, token in enumerate(tokens):
            if token == self._opening:
                self.reasoning_tokens += count
                return count
            if count == most or not self._tokenizer.piece(token).isspace():
                self._opening = None
                return 0
        return None

    def push(self, token: int) -> Spelt:
        if token == self._opening:
            self._open()
            return Spelt("")
        self.reasoning_tokens += self._closing is not None
        if token != self._closing:
            return self._stream.push(token)
        spelt = self._stream.finish()
        self._closing = None
        self._stream = self._answer([], mark=token)
        return spelt

    def end(self, token: int) -> Spelt:
        """Take the end token, which is hidden without `include_stop`; return the text it completes, and the stop string
        that it equals or completes, if any."""
        self.reasoning_tokens += self._closing is not None
        spelt = self._stream.end(token)
        if spelt.stop or token not in self._ending:
            return spelt
        stop = self._ending[token]
        unshown = stop if self._sample.include_stop and not self._stream.shows(token) else ""
        return Spelt(spelt.text + self._stream.finish().text + unshown, stop)

    def finish(self) -> Spelt:
        """Return the text held back, to be shown with the last token; called after the last token."""
        return self._stream.finish()

    def _open(self) -> None:
        assert self._sample.reasoning is not None
        self._opening, self._closing = None, self._sample.reasoning.closing
        self._stream = self._thought([])
        self.reasoning_tokens += 1

    def _thought(self, prompt: Sequence[int]) -> TextStream:
        """Return the stream of the reasoning."""
        return TextStream(self._tokenizer, prompt, (), special=self._sample.show_special, drops_space=True)

    def _answer(self, prompt: Sequence[int], *, mark: int | None = None) -> TextStream:
        """Return the stream of the answer, after the mark that closes its reasoning if there is one."""
        sample = self._sample
        return TextStream(
            self._tokenizer,
            prompt,
            sample.stop,
            sample.shown_tokens,
            special=sample.show_special,
            mark=mark,
            drops_space=mark is not None and sample.grammar is None,
            include_stop=sample.include_stop,
            min_tokens=sample.min_tokens - self.reasoning_tokens,
        )


class GrammarText:
    """The part of a text that its grammar constrains, for the check of the finished text: without the tokens before the
    grammar's start, special tokens, and the end token."""

    def __init__(self, sample: Sample, tokenizer: Tokenizer) -> None:
        grammar = sample.grammar
        assert grammar is not None
        self._sample = sample
        self._tokenizer = tokenizer
        self._awaited = grammar.after_token if grammar.HasField("after_token") else None
        self._opening = grammar.opening_token if grammar.HasField("opening_token") else None
        self._detokenizer = Detokenizer(tokenizer, sample.prompt)
        self._pieces: list[str] = []

    def push(self, token: int) -> None:
        if self._opening not in (None, token):
            self._awaited = None  # the grammar applies from the beginning
        self._opening = None
        if self._awaited is None:
            self._pieces.append(self._detokenizer.push(token))
        elif token == self._awaited:
            self._awaited = None
            self._detokenizer = Detokenizer(self._tokenizer, [])

    def finish(self, stop: str) -> str:
        """Return the text, which ends at this stop string unless it is empty. An earlier occurrence did not end the
        text (`min_tokens`)."""
        text = "".join(self._pieces) + self._detokenizer.flush()
        at = text.rfind(stop) if stop else -1
        return text if at < 0 else text[: at + (len(stop) if self._sample.include_stop else 0)]
