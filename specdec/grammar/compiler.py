"""Compiles grammars for one tokenizer, by llguidance (https://github.com/guidance-ai/llguidance).

Every service that follows a grammar compiles it for itself: what is sent is its source. The library's limits on work
are counted in units of work and not in seconds.

All copies of one of the library's matchers share the state of its lexer, which stands still for good once it has come
to its limit. So texts of different owners never share a matcher, and one whose lexer stands still is not used for new
texts."""

from __future__ import annotations

import gc
import json
import math
import threading
import time
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import cached_property
from typing import TYPE_CHECKING, Self

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from tokenizers import Tokenizer

from specdec.engine.memory import give_freed_memory_back
from specdec.grammar.grammar import LONGEST_PROBLEM, Grammar, GrammarError, Kind, lark_string
from specdec.grammar.text_grammar import TextGrammar
from specdec.grammar.weight import growth_bytes, lexer_states
from specdec.text.added_tokens import add
from specdec.text.token_bytes import TokenBytes

if TYPE_CHECKING:
    from pathlib import Path

    from llguidance._lib import JsonCompileOptions

    from specdec.engine.added_tokens import AddedToken
    from specdec.engine.model_directory import ModelDirectory

KEPT_BYTES = 512 << 20
"""Bytes of compiled grammars of a process, with what their lexers may grow to: some hundred schemas of usual size."""

OWNER_BYTES = KEPT_BYTES // 2
"""Bytes of these that a named owner may have."""

MAX_GRAMMAR_BYTES = 160 << 20
"""Bytes of one compiled grammar: less than what its owner may have."""

IDLE_SECONDS = 600.0
"""Seconds after which a grammar that no text uses is forgotten."""

COLLECT_SECONDS = 1.0
"""Least time between two garbage collections for want of room."""

GIVEN_BACK_BYTES = 64 << 20
"""Bytes of grammars that are freed before malloc is told to give free memory back to the system. That costs later
steps page faults."""

STYLE: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""How JSON is written unless a schema's `x-guidance` says otherwise: in one line, as most programs write it. Where any
white space may stand, little is forced."""

STEP_ITEMS, ROW_ITEMS, STEP_FUEL = 5_000, 250, 50_000
"""Most work of the parser, for one token and at one place, and of the lexer, in the library's units: a few milliseconds
by the speeds that it names, since others' texts share the step. The schemas of `test_a_thousand_schemas` never come to
them."""


class GrammarRoomError(Exception):
    """Running texts use the compiled grammars that take all of the room: of their owner's, or of all."""

    def __init__(self, limit: int, *, of_owner: bool) -> None:
        super().__init__(f"the grammars of running texts take nearly {limit >> 20} MiB, the limit is reached")
        self.of_owner = of_owner


class SharedMatcher:
    """A matcher at the beginning of its grammar, of which each text has a copy."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher
        self.spent = False
        """True once a copy has come to one of the library's limits: the lexer that all copies share may stand still."""
        self.users: weakref.WeakSet[CompiledGrammar] = weakref.WeakSet()
        self.used = time.monotonic()  # when it was last asked for

    def spend(self) -> None:
        self.spent = True


class CompiledGrammar:
    """A grammar that is ready to be followed by the texts of one owner. It stays compiled while this object lives."""

    def __init__(self, shared: SharedMatcher, grammar: Grammar, vocabulary: int) -> None:
        self._shared = shared
        self._grammar = grammar
        self._vocabulary = vocabulary

    def begin(self, generated: Sequence[int], end_tokens: frozenset[int]) -> TextGrammar:
        """Return where a text stands that has these tokens already; GrammarError if they do not fit."""
        shared = self._shared
        text = TextGrammar(shared.matcher.deep_copy(), self._grammar, end_tokens, self._vocabulary, shared.spend)
        text.commit(generated)
        if text.error is not None:
            raise text.error
        return text


_Key = tuple[str, Kind, tuple[str, ...]]


class GrammarCompiler:
    """Compiles grammars for the tokenizer of a model, whose logits are `vocabulary` wide. Any thread may use it.

    Compiled grammars are kept, up to `kept_bytes` in all and `owner_bytes` of a named owner; the one that was not used
    for the longest gives way. One that a text uses counts until the text has let go of it.
    """

    def __init__(
        self,
        tokenizer_file: Path,
        vocabulary: int,
        added: Sequence[AddedToken] = (),
        *,
        kept_bytes: int = KEPT_BYTES,
        owner_bytes: int = OWNER_BYTES,
    ) -> None:
        """`added` are tokens that other files of the model add to those of the tokenizer's file."""
        self._file = tokenizer_file
        self._added = added
        self._vocabulary = vocabulary
        self._kept_bytes = kept_bytes
        self._owner_bytes = owner_bytes
        self._kept: OrderedDict[_Key, Future[SharedMatcher]] = OrderedDict()  # the one to give way first comes first
        self._bytes: Counter[str] = Counter()  # of all matchers that exist, by owner
        self._freed: deque[tuple[str, int]] = deque()  # owners and bytes of matchers that no longer exist
        self._collected_at = -math.inf  # when garbage was last collected
        self._untrimmed = 0  # bytes freed since malloc last gave memory back
        self._lock = threading.Lock()

    @classmethod
    def of(cls, directory: ModelDirectory) -> Self:
        """Return a compiler for the model of a directory."""
        return cls(directory.path / "tokenizer.json", directory.vocabulary, directory.tokenizer_files.to_add())

    def prepare(self) -> None:
        """Read the tokenizer now, before anybody waits: that of 131,072 tokens takes a second, for most of which no
        other thread of the process runs."""
        _ = self._tokenizer

    @property
    def bytes(self) -> int:
        """Bytes that compiled grammars take, with what their lexers may grow to."""
        with self._lock:
            self._settle()
            return self._bytes.total()

    def compile(self, grammar: Grammar, owner: str = "", weight: int = 0) -> CompiledGrammar:
        """Compile a grammar, which takes `weight` bytes before its lexer grows, for texts of an owner. GrammarError if
        it cannot be, or lets no text begin; GrammarRoomError if there is no room. Takes a millisecond, or a second for
        the largest; other threads run meanwhile, and callers that want the same wait for it."""
        key, size = (owner, grammar.kind, grammar.source), weight + growth_bytes(grammar)
        if size > MAX_GRAMMAR_BYTES:
            raise GrammarError(f"takes up to {size >> 20} MiB compiled, may take at most {MAX_GRAMMAR_BYTES >> 20}")
        mine = False
        with self._lock:
            found = self._kept.pop(key, None)
            if found is None or _is_spent(found):
                self._make_room(owner, size)
                self._bytes[owner] += size
                found, mine = Future(), True
            self._kept[key] = found
        if mine:
            self._trim()
            try:
                shared = SharedMatcher(self._matcher(grammar))
            except BaseException as error:
                with self._lock:
                    if self._kept.get(key) is found:
                        del self._kept[key]
                self._freed.append((owner, size))
                found.set_exception(error)
            else:
                # Runs wherever the last reference goes, perhaps while this lock is held: so it takes no lock.
                weakref.finalize(shared, self._freed.append, (owner, size)).atexit = False
                found.set_result(shared)
        shared = found.result()
        with self._lock:
            return self._used(shared, grammar)

    def kept(self, grammar: Grammar, owner: str = "") -> CompiledGrammar | None:
        """Return a grammar that is compiled already; None if it is not."""
        key = owner, grammar.kind, grammar.source
        with self._lock:
            found = self._kept.get(key)
            if found is None or not found.done() or found.exception() is not None or found.result().spent:
                return None
            self._kept.move_to_end(key)
            return self._used(found.result(), grammar)

    def forget(self) -> None:
        """Forget all grammars that no text uses."""
        with self._lock:
            self._evict(list(self._kept))
            self._settle()

    def _used(self, shared: SharedMatcher, grammar: Grammar) -> CompiledGrammar:
        """Return a grammar that counts as used from now on. Holds the lock."""
        compiled = CompiledGrammar(shared, grammar, self._vocabulary)
        shared.used = time.monotonic()
        shared.users.add(compiled)
        return compiled

    def _make_room(self, owner: str, size: int) -> None:
        """Evict grammars, until one more of this size has room; GrammarRoomError if texts use too many. Holds the
        lock."""
        before = time.monotonic() - IDLE_SECONDS
        self._evict([key for key, found in self._kept.items() if _is_old(found, before)])
        self._settle()
        lacking = self._lacking(owner, size)
        if lacking is not None and self._collect():
            lacking = self._lacking(owner, size)
        if lacking is not None:
            raise lacking

    def _lacking(self, owner: str, size: int) -> GrammarRoomError | None:
        """Evict grammars until one more of this size has room. Return the error if it has none. Holds the lock."""
        if owner:
            own = [key for key in self._kept if key[0] == owner]
            self._evict_until(lambda: self._bytes[owner] + size <= self._owner_bytes, own)
            if self._bytes[owner] + size > self._owner_bytes:
                return GrammarRoomError(self._owner_bytes, of_owner=True)
        self._evict_until(lambda: self._bytes.total() + size <= self._kept_bytes, list(self._kept))
        if self._bytes.total() + size > self._kept_bytes:
            return GrammarRoomError(self._kept_bytes, of_owner=False)
        return None

    def _collect(self) -> bool:
        """Free sessions that have ended: their token trees are cycles, which hold grammars until the next garbage
        collection. Return whether it was done, at most once in COLLECT_SECONDS: it holds up other threads for some
        milliseconds. Holds the lock."""
        if time.monotonic() - self._collected_at < COLLECT_SECONDS:
            return False
        gc.collect()
        self._settle()
        self._collected_at = time.monotonic()
        return True

    def _evict_until(self, enough: Callable[[], bool], keys: Iterable[_Key]) -> None:
        for key in keys:
            if enough():
                return
            self._evict([key])
            self._settle()

    def _evict(self, keys: Iterable[_Key]) -> None:
        """Forget those of these grammars that no text uses: others would stay in memory all the same."""
        for key in keys:
            if not _is_used(self._kept[key]):
                del self._kept[key]

    def _settle(self) -> None:
        """Count what has been freed. Holds the lock."""
        while self._freed:
            owner, size = self._freed.popleft()
            self._untrimmed += size
            self._bytes[owner] -= size
            if not self._bytes[owner]:
                del self._bytes[owner]

    def _trim(self) -> None:
        """Give memory back to the system, if much was freed."""
        with self._lock:
            if self._untrimmed < GIVEN_BACK_BYTES:
                return
            self._untrimmed = 0
        give_freed_memory_back()

    def _matcher(self, grammar: Grammar) -> LLMatcher:
        limits = LLParserLimits(
            max_items_in_row=ROW_ITEMS,
            step_max_items=STEP_ITEMS,
            step_lexer_fuel=STEP_FUEL,
            max_lexer_states=lexer_states(grammar),
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


def _is_used(found: Future[SharedMatcher]) -> bool:
    """Return whether a text uses a grammar, or waits for it."""
    return not found.done() or (found.exception() is None and bool(found.result().users))


def _is_old(found: Future[SharedMatcher], before: float) -> bool:
    """Return whether a grammar was last asked for before this time."""
    return found.done() and found.exception() is None and found.result().used < before


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
