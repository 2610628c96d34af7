"""Compiles grammars for one tokenizer, by llguidance (https://github.com/guidance-ai/llguidance).

Every service that follows a grammar compiles it for itself: what is sent is its source. The library's limits on work
are counted in units of work and not in seconds.

All copies of one of the library's matchers share the state of its lexer, which stands still for good once it has come
to its limit. So texts of different owners never share a matcher, and one whose lexer stands still is not used for new
texts."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from functools import cached_property
from typing import TYPE_CHECKING, Self

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from tokenizers import Tokenizer

from specdec.grammar.grammar import LONGEST_PROBLEM, Grammar, GrammarError, Kind, lark_string
from specdec.grammar.text_grammar import TextGrammar
from specdec.text.added_tokens import add
from specdec.text.token_bytes import TokenBytes

if TYPE_CHECKING:
    from pathlib import Path

    from llguidance._lib import JsonCompileOptions

    from specdec.engine.added_tokens import AddedToken
    from specdec.engine.model_directory import ModelDirectory

KEPT, KEPT_IN_ALL = 64, 256
"""Compiled grammars that are kept of an owner, and of all: the same schema comes again and again."""

STYLE: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""How JSON is written unless a schema's `x-guidance` says otherwise: in one line, as most programs write it. Where any
white space may stand, little is forced."""

STEP_ITEMS, ROW_ITEMS, STEP_FUEL = 5_000, 250, 50_000
"""Most work of the parser, for one token and at one place, and of the lexer, in the library's units: a few milliseconds
by the speeds that it names, since others' texts share the step. The schemas of `test_a_thousand_schemas` never come to
them."""

LEXER_STATES = 50_000
"""Most states of a lexer, of one or two kilobytes each."""


class SharedMatcher:
    """A matcher at the beginning of its grammar, of which each text has a copy."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher
        self.spent = False
        """True once a copy has come to one of the library's limits: the lexer that all copies share may stand still."""

    def spend(self) -> None:
        self.spent = True


class CompiledGrammar:
    """A grammar that is ready to be followed, by any number of texts of one owner."""

    def __init__(self, shared: SharedMatcher, grammar: Grammar, vocabulary: int) -> None:
        self._shared = shared
        self._grammar = grammar
        self._vocabulary = vocabulary

    def begin(self, generated: Sequence[int], end_tokens: frozenset[int]) -> TextGrammar:
        """Return where a text stands that has so many tokens already; GrammarError if they do not fit."""
        shared = self._shared
        text = TextGrammar(shared.matcher.deep_copy(), self._grammar, end_tokens, self._vocabulary, shared.spend)
        text.commit(generated)
        if text.error is not None:
            raise text.error
        return text


_Key = tuple[str, Kind, tuple[str, ...]]


class GrammarCompiler:
    """Compiles grammars for the tokenizer of a model, whose logits are `vocabulary` wide. Any thread may use it."""

    def __init__(self, tokenizer_file: Path, vocabulary: int, added: Sequence[AddedToken] = ()) -> None:
        """`added` are tokens that other files of the model add to those of the tokenizer's file."""
        self._file = tokenizer_file
        self._added = added
        self._vocabulary = vocabulary
        self._kept: OrderedDict[_Key, Future[SharedMatcher]] = OrderedDict()
        self._lock = threading.Lock()

    @classmethod
    def of(cls, directory: ModelDirectory) -> Self:
        """Return a compiler for the model of a directory."""
        return cls(directory.path / "tokenizer.json", directory.vocabulary, directory.tokenizer_files.to_add())

    def prepare(self) -> None:
        """Read the tokenizer now, before anybody waits: that of 131,072 tokens takes a second, for most of which no
        other thread of the process runs."""
        _ = self._tokenizer

    def compile(self, grammar: Grammar, owner: str = "") -> CompiledGrammar:
        """Compile a grammar for texts of an owner; GrammarError if it cannot be, or lets no text begin. Takes a
        millisecond, or a second for the largest; other threads run meanwhile, and who wants the same waits."""
        key = owner, grammar.kind, grammar.source
        with self._lock:
            found, mine = self._kept.pop(key, None), False
            if found is None or _is_spent(found):
                found, mine = Future(), True
            self._kept[key] = found
            for oldest in [each for each in self._kept if each[0] == owner][:-KEPT]:
                del self._kept[oldest]
            while len(self._kept) > KEPT_IN_ALL:
                self._kept.popitem(last=False)
        if mine:
            try:
                found.set_result(SharedMatcher(self._matcher(grammar)))
            except BaseException as error:
                with self._lock:
                    if self._kept.get(key) is found:
                        del self._kept[key]
                found.set_exception(error)
        return CompiledGrammar(found.result(), grammar, self._vocabulary)

    def keeps(self, grammar: Grammar, owner: str = "") -> bool:
        """Return whether a grammar is compiled already."""
        with self._lock:
            found = self._kept.get((owner, grammar.kind, grammar.source))
        return found is not None and found.done() and not _is_spent(found)

    def _matcher(self, grammar: Grammar) -> LLMatcher:
        limits = LLParserLimits(
            max_items_in_row=ROW_ITEMS,
            step_max_items=STEP_ITEMS,
            step_lexer_fuel=STEP_FUEL,
            max_lexer_states=LEXER_STATES,
            verbose_errors=False,
        )
        matcher = LLMatcher(self._tokenizer, _in_library_form(grammar), log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # finds that nothing can begin a text
        if matcher.is_error():
            raise GrammarError(_told(matcher.get_error()))
        return matcher

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        """The library's view of the tokenizer. It gets an end token of its own, beyond the vocabulary: which tokens end
        a text is each request's to say."""
        tokenizer = Tokenizer.from_file(str(self._file))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        add(tokenizer, self._added)
        end, pieces = self._vocabulary, TokenBytes(tokenizer)
        added = tokenizer.get_added_tokens_decoder()

        class View:
            eos_token_id = end
            bos_token_id = None
            tokens = [pieces.of(token) for token in range(end)] + [b"<end>"]
            special_token_ids = [token for token, each in added.items() if each.special and token < end] + [end]

            def __call__(self, text: bytes | str) -> list[int]:
                text = text if isinstance(text, str) else text.decode(errors="replace")
                return list(tokenizer.encode(text, add_special_tokens=False).ids)

        return LLTokenizer(TokenizerWrapper(View()))


def _is_spent(found: Future[SharedMatcher]) -> bool:
    return found.done() and found.exception() is None and found.result().spent


def _in_library_form(grammar: Grammar) -> str:
    (source, *_) = grammar.source
    try:
        match grammar.kind:
            case Kind.JSON_SCHEMA:
                json.loads(source)
                return LLMatcher.grammar_from_json_schema(source, STYLE)
            case Kind.REGEX:
                return LLMatcher.grammar_from_regex(source)
            case Kind.LARK:
                return LLMatcher.grammar_from_lark(source)
            case Kind.CHOICE:
                return LLMatcher.grammar_from_lark("start: " + " | ".join(map(lark_string, grammar.source)))
    except (ValueError, RecursionError) as error:
        raise GrammarError(_told(str(error))) from None


def _told(problem: str) -> str:
    """Return a problem of the library's in one short line."""
    if problem.startswith("NoExtension"):
        return "lets no text begin"
    first, *others = problem.splitlines() or [""]
    told = next((line for line in others if line.startswith("error: ")), first)  # of a regex: the rest draws where
    return "cannot be used: " + told[:LONGEST_PROBLEM]
