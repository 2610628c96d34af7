"""Regular languages: rewrites JSON Schema's regular expressions in Rust's syntax. The results match whole strings and
have no look-around.

An expression is read as a language: the possible contents of a string from some place to its end. Look-ahead is then an
intersection or a complement. Derivatives (Brzozowski, 1964) turn this into an automaton, which becomes a plain
expression again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from enum import Enum
from itertools import pairwise
from typing import NamedTuple

from specdec.grammar.patterns import (
    EVERY,
    LAST,
    Alternation,
    Anchor,
    CharacterClass,
    Concatenation,
    LookAhead,
    PatternError,
    PatternReader,
    PatternTooLargeError,
    Quantified,
    Ranges,
    Syntax,
    WorkSpentError,
    asserts,
    has,
    spelt,
    union,
    width,
)

MAX_WORK = 20_000
"""Maximum expressions, and maximum derivatives, built for one request: some 50 ms."""

MAX_STATES = 64
"""Maximum states of an automaton that is turned into an expression."""

MAX_CHARACTERS = 8192
"""Maximum characters of an expression that replaces another one."""

MAX_UNROLLED = 8
"""Maximum repetitions of a group that contains look-around or anchors, since each repetition is written out."""


class Operator(Enum):
    CHARACTERS = 0
    EMPTY_STRING = 1
    CONCATENATION = 2
    UNION = 3
    INTERSECTION = 4
    COMPLEMENT = 5
    REPETITION = 6


class Expression(NamedTuple):
    """An expression for a language; its parts are the numbers of other expressions."""

    kind: Operator
    parts: tuple[int, ...] = ()
    ranges: Ranges = ()
    least: int = 0
    most: int | None = None


class Place(Enum):
    """A position in a string, as far as it is known: the beginning, a later one, or either."""

    BEGIN = 0
    LATER = 1
    EITHER = 2


class Languages:
    """Languages by number, each built once. PatternError if there are too many."""

    def __init__(self) -> None:
        self._nodes: list[Expression] = []
        self._numbers: dict[Expression, int] = {}
        self._derived: dict[tuple[int, int], int] = {}
        self._nullable: dict[int, bool] = {}
        self._written: dict[str, int] = {}  # languages of the expressions that `pattern` has returned
        self.nothing = self.characters(())
        self.empty_string = self._number(Expression(Operator.EMPTY_STRING))
        self.all = self.repetition(self.characters(EVERY), 0, None)

    # Constructors. Equal languages often get equal numbers, which keeps automata small.

    def _number(self, node: Expression) -> int:
        found = self._numbers.get(node)
        if found is None:
            if len(self._nodes) >= MAX_WORK:
                raise WorkSpentError("makes the request's expressions too large in total")
            found = self._numbers[node] = len(self._nodes)
            self._nodes.append(node)
        return found

    def characters(self, ranges: Ranges) -> int:
        return self._number(Expression(Operator.CHARACTERS, ranges=ranges))

    def literal(self, text: str) -> int:
        """Return the language of one string."""
        found = self.empty_string
        for character in reversed(text):
            found = self.concatenation(self.characters(((ord(character), ord(character)),)), found)
        return found

    def concatenation(self, first: int, second: int) -> int:
        if self.nothing in (first, second):
            return self.nothing
        if first == self.empty_string:
            return second
        if second == self.empty_string or (first == self.all and second == self.all):
            return first
        for part in reversed(list(self._spine(first))):  # nested only to the right
            second = self._number(Expression(Operator.CONCATENATION, (part, second)))
        return second

    def union(self, parts: Iterable[int]) -> int:
        found, ranges = set[int](), list[tuple[int, int]]()
        for part in self._flat(parts, Operator.UNION):
            node = self._nodes[part]
            if node.kind is Operator.CHARACTERS:
                ranges += node.ranges
            else:
                found.add(part)
        if self.all in found:
            return self.all
        if ranges:
            found.add(self.characters(union(ranges)))
        return self._joined(found, Operator.UNION, self.nothing)

    def intersection(self, parts: Iterable[int]) -> int:
        found = set(self._flat(parts, Operator.INTERSECTION)) - {self.all}
        if self.nothing in found:
            return self.nothing
        if self.empty_string in found:
            return self.empty_string if all(map(self.nullable, found)) else self.nothing
        return self._joined(found, Operator.INTERSECTION, self.all)

    def complement(self, part: int) -> int:
        if part in (self.nothing, self.all):
            return self.all if part == self.nothing else self.nothing
        node = self._nodes[part]
        if node.kind is Operator.COMPLEMENT:
            return node.parts[0]
        return self._number(Expression(Operator.COMPLEMENT, (part,)))

    def repetition(self, part: int, least: int, most: int | None) -> int:
        if most == 0 or part == self.empty_string or (part == self.nothing and least == 0):
            return self.empty_string
        if part == self.nothing or (least, most) == (1, 1):
            return part
        return self._number(Expression(Operator.REPETITION, (part,), least=least, most=most))

    def _flat(self, parts: Iterable[int], kind: Operator) -> Iterable[int]:
        for part in parts:
            node = self._nodes[part]
            yield from node.parts if node.kind is kind else (part,)

    def _spine(self, number: int) -> Iterator[int]:
        """Yield the parts of a concatenation."""
        while (node := self._nodes[number]).kind is Operator.CONCATENATION:
            part, number = node.parts
            yield part
        yield number

    def _joined(self, parts: set[int], kind: Operator, without: int) -> int:
        if len(parts) < 2:
            return next(iter(parts), without)
        return self._number(Expression(kind, tuple(sorted(parts))))

    # Queries.

    def nullable(self, number: int) -> bool:
        """Return True if a language contains the empty string."""
        found = self._nullable.get(number)
        if found is None:
            kind, parts, _, least, _ = self._nodes[number]
            match kind:
                case Operator.EMPTY_STRING:
                    found = True
                case Operator.CHARACTERS:
                    found = False
                case Operator.CONCATENATION | Operator.INTERSECTION:
                    found = all(map(self.nullable, parts))
                case Operator.UNION:
                    found = any(map(self.nullable, parts))
                case Operator.COMPLEMENT:
                    found = not self.nullable(parts[0])
                case Operator.REPETITION:
                    found = least == 0 or self.nullable(parts[0])
            self._nullable[number] = found
        return found

    def derivative(self, number: int, character: int) -> int:
        """Return the derivative of a language by a character: the strings that can follow the character."""
        found = self._derived.get((number, character))
        if found is None:
            found = self._derived[number, character] = self._derive(number, character)
            if len(self._derived) > MAX_WORK:
                raise WorkSpentError("makes the request's expressions too large in total")
        return found

    def _derive(self, number: int, character: int) -> int:
        kind, parts, ranges, least, most = self._nodes[number]
        match kind:
            case Operator.EMPTY_STRING:
                return self.nothing
            case Operator.CHARACTERS:
                return self.empty_string if has(ranges, character) else self.nothing
            case Operator.CONCATENATION:
                first, second = parts
                found = self.concatenation(self.derivative(first, character), second)
                return self.union((found, self.derivative(second, character))) if self.nullable(first) else found
            case Operator.UNION:
                return self.union([self.derivative(part, character) for part in parts])
            case Operator.INTERSECTION:
                return self.intersection([self.derivative(part, character) for part in parts])
            case Operator.COMPLEMENT:
                return self.complement(self.derivative(parts[0], character))
            case Operator.REPETITION:
                rest = self.repetition(parts[0], max(0, least - 1), None if most is None else most - 1)
                return self.concatenation(self.derivative(parts[0], character), rest)

    def has(self, number: int, text: str) -> bool:
        """Return True if a string is in a language."""
        try:
            for character in text:
                number = self.derivative(number, ord(character))
            return self.nullable(number)
        except RecursionError:
            raise PatternTooLargeError("is nested too deeply") from None

    # From expressions, and back.

    def of_pattern(self, pattern: str) -> int:
        """Return the language of the strings that contain a match of an expression of JSON Schema. PatternError if it
        cannot be determined, UnreadableError if the expression cannot be parsed here."""
        try:
            syntax = PatternReader(pattern).whole()
            at_begin = self._language(syntax, self.all, Place.BEGIN)
            later = self._language(syntax, self.all, Place.LATER)
        except RecursionError:
            raise PatternTooLargeError("is nested too deeply") from None
        if at_begin == later:  # without an anchor
            return self.concatenation(self.all, later)
        some = self.repetition(self.characters(EVERY), 1, None)
        return self.union((at_begin, self.concatenation(some, later)))

    def of_key(self, pattern: str) -> int:
        """Return the result of `of_pattern`, without parsing an expression that `pattern` has returned."""
        found = self._written.get(pattern)
        return self.of_pattern(pattern) if found is None else found

    def patterns(self, number: int) -> list[str]:
        """Return expressions; the language consists of the strings that all of them match."""
        node = self._nodes[number]
        return [self.pattern(part) for part in (node.parts if node.kind is Operator.INTERSECTION else (number,))]

    def pattern(self, number: int) -> str:
        """Return an expression that matches the strings of a language; PatternError if it is too large."""
        try:
            plain = number if self._is_plain(number) else self._automaton(number)
            found = f"^(?:{self._spelt(plain, {})})$"
        except RecursionError:
            raise PatternTooLargeError("is nested too deeply") from None
        self._written[found] = number
        return found

    def _language(self, syntax: Syntax, rest: int, place: Place) -> int:
        """Return the language of a match followed by `rest`: possible contents of a string from `place` to its end."""
        if not asserts(syntax):
            return self.concatenation(self._plain(syntax), rest)
        match syntax:
            case Anchor.BEGIN if place is Place.EITHER:
                raise PatternError("has a ^ behind something that may be empty")
            case Anchor.BEGIN:
                return rest if place is Place.BEGIN else self.nothing
            case Anchor.END:
                return self.intersection((self.empty_string, rest))
            case LookAhead(part, negative):
                ahead = self._language(part, self.all, place)
                return self.intersection((self.complement(ahead) if negative else ahead, rest))
            case Alternation(parts):
                return self.union([self._language(part, rest, place) for part in parts])
            case Concatenation(parts):
                places = [place]
                for part in parts[:-1]:
                    places.append(_after(part, places[-1]))
                for part, here in zip(reversed(parts), reversed(places), strict=True):
                    rest = self._language(part, rest, here)
                return rest
            case Quantified():
                return self._repeated(syntax, rest, place)
        raise AssertionError(syntax)

    def _repeated(self, syntax: Quantified[Syntax], rest: int, place: Place) -> int:
        """Return the language as `_language` does, for a repetition that contains assertions."""
        part, least, most = syntax.part, syntax.least, syntax.most
        match part:
            case Concatenation((LookAhead(excluded, True), CharacterClass(ranges))) if most is None and least == 0:
                if rest == self.empty_string:  # the excluded part begins nowhere in the string
                    found = self._language(excluded, self.all, Place.LATER)
                    if place is not Place.LATER and found != self._language(excluded, self.all, Place.BEGIN):
                        raise PatternError("repeats a ^")
                    if not self.nullable(found):
                        free = self.repetition(self.characters(ranges), 0, None)
                        anywhere = self.concatenation(self.all, found)
                        return self.intersection((free, self.complement(anywhere)))
        if most is None or most > MAX_UNROLLED:
            raise PatternError("repeats a group with look-around or an anchor in it")
        if most == 0:
            return rest
        again = self._repeated(Quantified(part, max(0, least - 1), most - 1), rest, _after(part, place))
        found = self._language(part, again, place)
        return found if least > 0 else self.union((found, rest))

    def _plain(self, syntax: Syntax) -> int:
        """Return the language of an expression without assertions."""
        match syntax:
            case CharacterClass(ranges):
                return self.characters(ranges)
            case Alternation(parts):
                return self.union(list(map(self._plain, parts)))
            case Concatenation(parts):
                found = self.empty_string
                for part in reversed(parts):
                    found = self.concatenation(self._plain(part), found)
                return found
            case Quantified(part, least, most):
                return self.repetition(self._plain(part), least, most)
        raise AssertionError(syntax)

    def _is_plain(self, number: int) -> bool:
        seen, ahead = set[int](), [number]
        while ahead:
            node = self._nodes[ahead.pop()]
            if node.kind in (Operator.INTERSECTION, Operator.COMPLEMENT):
                return False
            ahead += [part for part in node.parts if part not in seen]
            seen.update(node.parts)
        return True

    def _automaton(self, number: int) -> int:
        """Return the same language without intersections and complements, by an automaton whose states are eliminated
        one by one (Brzozowski and McCluskey, 1963)."""
        states, edges = [number], dict[tuple[int, int], int]()
        classes = self._classes(number)
        for state in states:  # the list grows during the loop
            reached: dict[int, list[tuple[int, int]]] = {}
            for ranges in classes:
                reached.setdefault(self.derivative(state, ranges[0][0]), []).extend(ranges)
            for target, found in reached.items():
                if target != self.nothing:
                    edges[state, target] = self.characters(union(found))
                    if target not in states:
                        states.append(target)
            if len(states) > MAX_STATES:
                raise PatternTooLargeError("makes too large an automaton")
        begin, end = -1, -2
        edges[begin, number] = self.empty_string
        edges |= {(state, end): self.empty_string for state in states if self.nullable(state)}
        left = set(states)
        while left:
            into_it = Counter(last for first, last in edges if first != last)
            out_of_it = Counter(first for first, last in edges if first != last)
            state = min(left, key=lambda state: (into_it[state] * out_of_it[state], state))
            left.discard(state)
            loop = self.repetition(edges.pop((state, state), self.nothing), 0, None)
            into = [(first, edges.pop((first, last))) for first, last in list(edges) if last == state]
            out = [(last, edges.pop((first, last))) for first, last in list(edges) if first == state]
            for first, before in into:
                for last, after in out:
                    way = self.concatenation(before, self.concatenation(loop, after))
                    edges[first, last] = self.union((edges.get((first, last), self.nothing), way))
        return edges.get((begin, end), self.nothing)

    def _classes(self, number: int) -> list[Ranges]:
        """Return sets of characters that a language and its derivatives do not distinguish."""
        sets, seen, ahead = set[Ranges](), {number}, [number]
        while ahead:
            node = self._nodes[ahead.pop()]
            if node.kind is Operator.CHARACTERS:
                sets.add(node.ranges)
            ahead += [part for part in node.parts if part not in seen]
            seen.update(node.parts)
        if len(sets) > MAX_STATES:
            raise PatternTooLargeError("makes too large an automaton")
        bounds = sorted({0, LAST + 1, *(bound for found in sets for low, high in found for bound in (low, high + 1))})
        alike: dict[tuple[bool, ...], list[tuple[int, int]]] = {}
        for low, high in pairwise(bounds):
            alike.setdefault(tuple(has(found, low) for found in sets), []).append((low, high - 1))
        return list(map(union, alike.values()))

    def _spelt(self, number: int, known: dict[int, str]) -> str:
        """Return the expression, in Rust's syntax, of a language without intersections and complements."""
        if number not in known:
            kind, parts, ranges, least, most = self._nodes[number]
            match kind:
                case Operator.EMPTY_STRING:
                    found = ""
                case Operator.CHARACTERS:
                    found = spelt(ranges)
                case Operator.CONCATENATION:
                    found = "".join(self._spelt(part, known) for part in self._spine(number))
                case Operator.UNION:
                    found = f"(?:{'|'.join(self._spelt(part, known) for part in parts)})"
                case _:
                    inner = self._spelt(parts[0], known)
                    found = inner if self._nodes[parts[0]].kind is Operator.CHARACTERS else f"(?:{inner})"
                    found += {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((least, most)) or (
                        f"{{{least}}}" if least == most else f"{{{least},{'' if most is None else most}}}"
                    )
            if len(found) > MAX_CHARACTERS:
                raise PatternTooLargeError(f"makes an expression of more than {MAX_CHARACTERS} characters")
            known[number] = found
        return known[number]


def _after(syntax: Syntax, place: Place) -> Place:
    """Return the place after a match."""
    if place is Place.LATER:
        return place
    least, most = width(syntax)
    if least:
        return Place.LATER
    return place if most == 0 else Place.EITHER
