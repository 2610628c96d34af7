"""Regular expressions of JSON Schema (ECMA-262): their syntax, and sets of characters."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeAlias, TypeVar

Ranges = tuple[tuple[int, int], ...]
"""A set of characters: ascending ranges of code points, neither overlapping nor adjacent."""

MAX_GROUPS = 50
"""Maximum nesting of groups."""

LAST = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)


class PatternError(ValueError):
    """An expression has no equivalent that llguidance supports; the message gives the reason."""


class PatternTooLargeError(PatternError):
    """An expression is too large to rewrite."""


class WorkSpentError(PatternTooLargeError):
    """The expressions of one request are together too large to rewrite."""


class UnreadableError(ValueError):
    """An expression cannot be parsed here: it is not valid in ECMA-262, or uses Unicode classes."""


class InvalidPatternError(UnreadableError):
    """An expression is not valid in any syntax."""


def union(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return the set of all characters of these ranges."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(found[-1][1], high)
        else:
            found.append((low, high))
    return tuple(found)


def complement(ranges: Ranges) -> Ranges:
    """Return the set of all other characters."""
    found, begin = [], 0
    for low, high in ranges:
        if begin < low:
            found.append((begin, low - 1))
        begin = high + 1
    return (*found, (begin, LAST)) if begin <= LAST else tuple(found)


EVERY: Ranges = ((0, LAST),)
DIGIT: Ranges = ((0x30, 0x39),)
WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
SPACE: Ranges = (
    *((9, 13), (32, 32), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F)),
    *((0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
)
DOT = complement(((10, 10), (13, 13), (0x2028, 0x2029)))
CLASSES = {"d": DIGIT, "w": WORD, "s": SPACE} | {
    "D": complement(DIGIT),
    "W": complement(WORD),
    "S": complement(SPACE),
}
CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}


# The syntax of an expression, before it is read as a language. `ebnf.py` reads its rules into the same classes.

Node = TypeVar("Node")


@dataclass(frozen=True)
class CharacterClass:
    ranges: Ranges


@dataclass(frozen=True)
class Concatenation(Generic[Node]):
    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Alternation(Generic[Node]):
    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Quantified(Generic[Node]):
    part: Node
    least: int
    most: int | None


@dataclass(frozen=True)
class LookAhead:
    part: Syntax
    negative: bool


class Anchor(Enum):
    BEGIN = "^"
    END = "$"


Syntax: TypeAlias = (
    "CharacterClass | Concatenation[Syntax] | Alternation[Syntax] | Quantified[Syntax] | LookAhead | Anchor"
)

MAX_DIGITS = 6
"""Maximum digits of a number of repetitions."""

_QUANTIFIER = re.compile(r"(?:([*+?])|\{(\d+)(?:(,)(\d+)?)?\})\??")
_GROUP = re.compile(r"\((\?:|\?=|\?!|\?<=|\?<!|\?<[A-Za-z_]\w*>|\?)?")
_HEX = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\}")


class PatternReader:
    """Reads an expression in ECMA-262's syntax."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0

    def whole(self) -> Syntax:
        """Return the syntax of the expression. UnreadableError if it cannot be parsed here, PatternError for parts that
        no grammar can follow."""
        found = self._choice()
        if self._at < len(self._text):
            raise InvalidPatternError("has an unmatched closing parenthesis")
        return found

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _choice(self) -> Syntax:
        parts = [self._sequence()]
        while self._peek() == "|":
            self._at += 1
            parts.append(self._sequence())
        return parts[0] if len(parts) == 1 else Alternation(tuple(parts))

    def _sequence(self) -> Syntax:
        parts: list[Syntax] = []
        while (character := self._peek()) and character not in "|)":
            part = self._part(character)
            if (found := _QUANTIFIER.match(self._text, self._at)) is not None:
                if isinstance(part, Anchor | LookAhead):
                    raise UnreadableError("repeats an assertion")
                self._at = found.end()
                part = Quantified(part, *_times(found))
            parts.append(part)
        return parts[0] if len(parts) == 1 else Concatenation(tuple(parts))

    def _part(self, character: str) -> Syntax:
        match character:
            case "(":
                return self._group()
            case "[":
                return self._class()
            case "\\":
                return CharacterClass(self._escape(in_class=False))
            case "*" | "+" | "?":
                is_first = self._text[: self._at][-1:] in ("", "(", "|")  # some syntaxes allow a**
                raise (InvalidPatternError if is_first else UnreadableError)("repeats nothing")
        self._at += 1
        match character:
            case "^" | "$":
                return Anchor(character)
            case ".":
                return CharacterClass(DOT)
        return CharacterClass(((ord(character), ord(character)),))

    def _group(self) -> Syntax:
        found = _GROUP.match(self._text, self._at)
        assert found is not None
        kind = found[1] or ""
        if kind in ("?<=", "?<!"):
            raise PatternError("uses look-behind, which has no equivalent here")
        if kind == "?":
            raise UnreadableError("has a group that is not valid in ECMA-262")
        self._at = found.end()
        self._depth += 1
        if self._depth > MAX_GROUPS:
            raise UnreadableError(f"nests more than {MAX_GROUPS} groups")
        inner = self._choice()
        self._depth -= 1
        if self._peek() != ")":
            raise InvalidPatternError("lacks a closing parenthesis")
        self._at += 1
        return LookAhead(inner, kind == "?!") if kind in ("?=", "?!") else inner

    def _class(self) -> Syntax:
        self._at += 1
        negated = self._peek() == "^"
        self._at += negated
        found: list[tuple[int, int]] = []
        while (character := self._peek()) != "]":
            if not character:
                raise InvalidPatternError("lacks a closing bracket")
            low = self._member()
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                high = self._member()
                if any(len(end) > 1 or end[0][0] != end[0][1] for end in (low, high)):
                    raise UnreadableError("has a class at the end of a range")  # valid without JavaScript's flag `u`
                if low[0][0] > high[0][0]:
                    raise InvalidPatternError("has an invalid range")
                low = ((low[0][0], high[0][1]),)
            found += low
        self._at += 1
        return CharacterClass(complement(union(found)) if negated else union(found))

    def _member(self) -> Ranges:
        character = self._peek()
        if character == "\\":
            return self._escape(in_class=True)
        self._at += 1
        return ((ord(character), ord(character)),)

    def _escape(self, *, in_class: bool) -> Ranges:
        self._at += 1
        character = self._peek()
        if (found := _HEX.match(self._text, self._at)) is not None:
            self._at = found.end()
            code = int(found[1] or found[2] or found[3], 16)
            if code > LAST or SURROGATES[0] <= code <= SURROGATES[1]:
                raise UnreadableError("has an invalid code point")
            return ((code, code),)
        if not in_class and character in "123456789k" and character:
            raise PatternError("refers back to a group, which no grammar can follow")
        if not in_class and character in "bB" and character:
            raise PatternError("has a word boundary, which has no equivalent here")
        self._at += 1
        if character in CLASSES:
            return CLASSES[character]
        if character == "b":
            return ((8, 8),)
        if character == "c" and (letter := self._peek()).isascii() and letter.isalpha():
            self._at += 1
            return ((ord(letter) % 32, ord(letter) % 32),)
        if not character or (character.isalnum() and character not in CONTROLS):
            raise UnreadableError("has an unsupported escape")
        code = CONTROLS.get(character, ord(character))
        return ((code, code),)


def _times(found: re.Match[str]) -> tuple[int, int | None]:
    """Return the minimum and maximum repetitions of a quantifier. A lazy quantifier matches the same strings."""
    sign, least, comma, most = found.groups()
    if sign:
        return {"*": (0, None), "+": (1, None), "?": (0, 1)}[sign]
    if max(len(least), len(most or "")) > MAX_DIGITS:
        raise UnreadableError(f"has a number of more than {MAX_DIGITS} digits")
    if not comma:
        return int(least), int(least)
    if most is not None and int(most) < int(least):
        raise InvalidPatternError("has a maximum below its minimum")
    return int(least), None if most is None else int(most)


def asserts(syntax: Syntax) -> bool:
    """Return True if an expression contains an anchor or look-ahead."""
    match syntax:
        case CharacterClass():
            return False
        case Quantified(part):
            return asserts(part)
        case Alternation(parts) | Concatenation(parts):
            return any(map(asserts, parts))
    return True


def width(syntax: Syntax) -> tuple[int, int]:
    """Return whether the shortest and the longest match contain any character, each as 0 or 1."""
    match syntax:
        case CharacterClass():
            return 1, 1
        case Quantified(part, least, most):
            shortest, longest = width(part)
            return (shortest if least else 0), (0 if most == 0 else longest)
        case Alternation(parts):
            widths = list(map(width, parts))
            return min(least for least, _ in widths), max(most for _, most in widths)
        case Concatenation(parts):
            widths = list(map(width, parts))
            return max((least for least, _ in widths), default=0), max((most for _, most in widths), default=0)
    return 0, 0


def has(ranges: Ranges, character: int) -> bool:
    """Return True if a character is in a set."""
    place = bisect_right(ranges, (character, LAST)) - 1
    return place >= 0 and ranges[place][0] <= character <= ranges[place][1]


def spelt(ranges: Ranges) -> str:
    """Return a set of characters in Rust's syntax."""
    if ranges == EVERY:
        return "(?s:.)"
    others = complement(ranges)
    negated = len(others) < len(ranges)
    valid = [part for low, high in (others if negated else ranges) for part in _without_surrogates(low, high)]
    if len(valid) == 1 and valid[0][0] == valid[0][1] and not negated:
        return _spelt_character(valid[0][0])
    members = "".join(
        _spelt_character(low) + ("" if low == high else f"-{_spelt_character(high)}") for low, high in valid
    )
    if not members:  # nothing but surrogates, which no text has
        return "(?s:.)" if negated else "[^\\x00-\\U0010ffff]"
    return f"[{'^' if negated else ''}{members}]"


def _without_surrogates(low: int, high: int) -> Sequence[tuple[int, int]]:
    parts = ((low, min(high, SURROGATES[0] - 1)), (max(low, SURROGATES[1] + 1), high))
    return [(first, last) for first, last in parts if first <= last]


def _spelt_character(code: int) -> str:
    if code < 0x80 and chr(code).isalnum():
        return chr(code)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
