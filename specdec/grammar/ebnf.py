"""Grammars in EBNF, as accepted by llama.cpp (GBNF) and vLLM, translated into Lark for llguidance.

EBNF derives a text character by character, while a Lark grammar first cuts it into terminals, each as long as possible.
So the result's terminals are single characters, except that a grammar without recursive rules becomes one terminal, if
its expression is short enough.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from specdec.grammar.grammar import MAX_RULES, MAX_SOURCE_BYTES, GrammarError
from specdec.grammar.patterns import (
    EVERY,
    MAX_GROUPS,
    Alternation,
    CharacterClass,
    Concatenation,
    Quantified,
    Ranges,
    complement,
    spelt,
    union,
)

MAX_EXPRESSION = 8192
"""Maximum characters of a regular expression that replaces a whole grammar."""

_RULE = re.compile(r"^[ \t]*+[\w-]++[ \t]*+::=", re.MULTILINE)


def is_ebnf(source: str) -> bool:
    """Return True if a grammar has a rule in EBNF."""
    return _RULE.search(source) is not None


@dataclass(frozen=True)
class Reference:
    name: str
    at: int


Part: TypeAlias = "CharacterClass | Reference | Concatenation[Part] | Alternation[Part] | Quantified[Part]"


def in_lark(source: str) -> str:
    """Return an equivalent Lark grammar; GrammarError, with line and column, if the source is invalid."""
    if len(source.encode()) > MAX_SOURCE_BYTES:
        raise GrammarError(f"has more than {MAX_SOURCE_BYTES} bytes")
    rules = _Reader(source).rules()
    if (expression := _whole_expression(rules)) is not None:
        return f"start: ROOT\nROOT: /{expression}/" if expression else 'start: ""'
    names = {name: f"rule_{number}" for number, name in enumerate(rules)} | {"root": "start"}
    return "\n".join(f"{names[name]}: {_in_rule(part, names)}" for name, part in rules.items())


class _Token(NamedTuple):
    kind: str
    text: str
    at: int


_TOKENS = re.compile(
    r"""(?P<space>(?:[ \t\r\n]|\#[^\n]*)+)
    |(?P<head>[\w-]++(?=[ \t]*+::=))|(?P<is>::=)|(?P<name>[\w-]++)
    |(?P<literal>"(?:[^"\\\n]|\\.)*+")|(?P<set>\[(?:[^\]\\\n]|\\.)*+\])
    |(?P<times>[*+?]|\{\s*+\d{1,6}\s*+\}|\{\s*+\d{0,6}+\s*+,\s*+\d{0,6}+\s*+\})
    |(?P<sign>[.()|])""",
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))|([^\\])", re.DOTALL)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "0": "\0"}


class _Reader:
    """Reads the rules of a grammar."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._tokens = self._all_tokens()
        self._at = 0
        self._depth = 0

    def rules(self) -> dict[str, Part]:
        """Return the rules that the rule `root` needs, by name."""
        found: dict[str, Part] = {}
        while self._peek().kind != "end":
            head = self._next("head", "a rule must begin here: NAME ::= ...")
            self._next("is", "::= must follow the name of a rule")
            if head.text in found:
                raise self._wrong(head.at, f"the rule {head.text} is defined twice")
            if len(found) == MAX_RULES:
                raise self._wrong(head.at, f"there are more than {MAX_RULES} rules")
            found[head.text] = self._alternatives()
        if "root" not in found:
            raise self._wrong(0, "there is no rule root")
        needed, ahead = dict.fromkeys(["root"]), ["root"]
        while ahead:
            for reference in _references(found[ahead.pop()]):
                if reference.name not in found:
                    raise self._wrong(reference.at, f"there is no rule {reference.name}")
                if reference.name not in needed:
                    needed[reference.name] = None
                    ahead.append(reference.name)
        return {name: found[name] for name in needed}

    def _all_tokens(self) -> list[_Token]:
        found, at = list[_Token](), 0
        while at < len(self._source):
            match = _TOKENS.match(self._source, at)
            if match is None:
                raise self._wrong(at, f"unexpected character {self._source[at]!r}")
            if match.lastgroup != "space":
                found.append(_Token(match.lastgroup or "", match[0], at))
            at = match.end()
        return [*found, _Token("end", "", at)]

    def _wrong(self, at: int, problem: str) -> GrammarError:
        before = self._source[:at]
        return GrammarError(f"line {before.count(chr(10)) + 1}, column {at - before.rfind(chr(10))}: {problem}")

    def _peek(self) -> _Token:
        return self._tokens[self._at]

    def _next(self, kind: str, problem: str) -> _Token:
        token = self._peek()
        if token.kind != kind:
            raise self._wrong(token.at, problem)
        self._at += 1
        return token

    def _alternatives(self) -> Part:
        parts = [self._sequence()]
        while self._peek().text == "|":
            self._at += 1
            parts.append(self._sequence())
        return parts[0] if len(parts) == 1 else Alternation(tuple(parts))

    def _sequence(self) -> Part:
        parts: list[Part] = []
        while True:
            token = self._peek()
            if token.kind in ("head", "end") or (token.kind == "sign" and token.text in "|)"):
                return parts[0] if len(parts) == 1 else Concatenation(tuple(parts))
            self._at += 1
            part = self._part(token)
            if self._peek().kind == "times":
                part = self._repeated(part)
            parts.append(part)

    def _part(self, token: _Token) -> Part:
        match token.kind:
            case "literal":
                codes = [ord(character) for character in self._characters(token)]
                parts = tuple(CharacterClass(((code, code),)) for code in codes)
                return parts[0] if len(parts) == 1 else Concatenation(parts)
            case "set":
                return CharacterClass(self._set(token))
            case "name":
                return Reference(token.text, token.at)
            case "sign" if token.text == ".":
                return CharacterClass(EVERY)
            case "sign":
                self._depth += 1
                if self._depth > MAX_GROUPS:
                    raise self._wrong(token.at, f"groups are nested more than {MAX_GROUPS} deep")
                inner = self._alternatives()
                self._depth -= 1
                if self._peek().text != ")":
                    raise self._wrong(token.at, "the parenthesis is not closed")
                self._at += 1
                return inner
        raise self._wrong(token.at, f"unexpected {token.text}")

    def _repeated(self, part: Part) -> Part:
        token = self._next("times", "")
        if token.text in "*+?":
            return Quantified(part, *{"*": (0, None), "+": (1, None), "?": (0, 1)}[token.text])
        least, comma, most = token.text.strip("{}").partition(",")
        first = int(least) if least.strip() else 0
        last = first if not comma else int(most) if most.strip() else None
        if last is not None and last < first:
            raise self._wrong(token.at, f"{token.text} has a maximum below its minimum")
        return Concatenation(()) if last == 0 else Quantified(part, first, last)

    def _characters(self, token: _Token) -> list[str]:
        """Return the characters of a literal or a set."""
        found = list[str]()
        for match in _ESCAPE.finditer(token.text[1:-1]):
            code = match[1] or match[2] or match[3]
            if code is not None:
                if not 0 <= int(code, 16) <= 0x10FFFF or 0xD800 <= int(code, 16) <= 0xDFFF:
                    raise self._wrong(token.at, f"{match[0]} is not a valid character")
                found.append(chr(int(code, 16)))
            elif match[4] is not None:
                if match[4].isalnum() and match[4] not in _ESCAPES:
                    raise self._wrong(token.at, f"{match[0]} is not a valid escape")
                found.append(_ESCAPES.get(match[4], match[4]))
            else:
                found.append(match[5])
        return found

    def _set(self, token: _Token) -> Ranges:
        negated = token.text.startswith("[^")
        inner = _Token(token.kind, "[" + token.text[2:] if negated else token.text, token.at)
        escaped = [match[5] is None for match in _ESCAPE.finditer(inner.text[1:-1])]
        characters, found, at = self._characters(inner), list[tuple[int, int]](), 0
        while at < len(characters):
            low = high = ord(characters[at])
            if at + 2 < len(characters) and characters[at + 1] == "-" and not escaped[at + 1]:
                high = ord(characters[at + 2])
                at += 2
            if high < low:
                raise self._wrong(token.at, f"{chr(low)}-{chr(high)} is not a range")
            found.append((low, high))
            at += 1
        return complement(union(found)) if negated else union(found)


def _references(part: Part) -> list[Reference]:
    match part:
        case Reference():
            return [part]
        case Concatenation(parts) | Alternation(parts):
            return [reference for inner in parts for reference in _references(inner)]
        case Quantified(inner):
            return _references(inner)
    return []


def _whole_expression(rules: Mapping[str, Part]) -> str | None:
    """Return the regular expression for a grammar; None if a rule is recursive, or if the expression is too long."""
    done: dict[str, str] = {}
    path, ahead = set[str](), [("root", False)]
    while ahead:
        name, finished = ahead.pop()
        if finished:
            path.discard(name)
            if sum(len(done[reference.name]) for reference in _references(rules[name])) > MAX_EXPRESSION:
                return None
            done[name] = _in_expression(rules[name], done)
            if len(done[name]) > MAX_EXPRESSION:
                return None
        elif name in path:
            return None
        elif name not in done:
            path.add(name)
            ahead.append((name, True))
            ahead += [(reference.name, False) for reference in _references(rules[name]) if reference.name not in done]
    return done["root"]


def _in_expression(part: Part, done: Mapping[str, str]) -> str:
    match part:
        case CharacterClass(ranges):
            return spelt(ranges)
        case Reference(name):
            return f"(?:{done[name]})"
        case Concatenation(parts):
            return "".join(_in_expression(inner, done) for inner in parts)
        case Alternation(parts):
            return f"(?:{'|'.join(_in_expression(inner, done) for inner in parts)})"
        case Quantified(inner):
            return f"(?:{_in_expression(inner, done)}){_suffix(part)}"


def _in_rule(part: Part, names: Mapping[str, str]) -> str:
    match part:
        case CharacterClass(ranges):
            return f"/{spelt(ranges)}/"
        case Reference(name):
            return names[name]
        case Concatenation(parts):
            return f"({' '.join(_in_rule(inner, names) for inner in parts)})" if parts else '""'
        case Alternation(parts):
            return f"({' | '.join(_in_rule(inner, names) for inner in parts)})"
        case Quantified(inner):
            return f"({_in_rule(inner, names)}){_suffix(part)}"


def _suffix(part: Quantified[Part]) -> str:
    return f"{{{part.least},{'' if part.most is None else part.most}}}"
