"""Compiles grammars for one tokenizer with llguidance (https://github.com/guidance-ai/llguidance).

Every service compiles its grammars itself; only their source is sent. llguidance counts work in its own units, not in
seconds.

All copies of a library matcher share the state of its lexer, and a lexer that reaches its limit stops permanently. So
owners never share a matcher, and a matcher with a stopped lexer is not used for new texts.
"""

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
from specdec.grammar.grammar import MAX_PROBLEM_CHARACTERS, Grammar, GrammarError, Kind, lark_string
from specdec.grammar.text_grammar import TextGrammar
from specdec.grammar.weight import growth_bytes, lexer_states
from specdec.text.token_bytes import TokenBytes
from specdec.text.tokenizer import add

if TYPE_CHECKING:
    from pathlib import Path

    from llguidance._lib import JsonCompileOptions

    from specdec.engine.added_tokens import AddedToken
    from specdec.engine.model_directory import ModelDirectory

KEPT_BYTES = 512 << 20
"""Budget for a process's compiled grammars, including growth of their lexers: a few hundred schemas of usual size."""

OWNER_BYTES = KEPT_BYTES // 2
"""Part of this budget available to a single named owner."""

MAX_GRAMMAR_BYTES = 160 << 20
"""Limit for one compiled grammar, below its owner's limit."""

IDLE_SECONDS = 600.0
"""Seconds after which an unused grammar is evicted."""

COLLECT_SECONDS = 1.0
"""Minimum time between two garbage collections that are run to free room."""

GIVEN_BACK_BYTES = 64 << 20
"""Bytes of freed grammars at which malloc is trimmed. Returning memory to the system costs page faults in later
steps."""

STYLE: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON layout unless a schema's `x-guidance` sets it: one line, as most programs write it. Flexible white space would
leave few forced tokens."""

FREE_STYLE: JsonCompileOptions = {**STYLE, "item_separator": ",", "key_separator": ":"}
"""Layout of a schema whose `x-guidance` allows white space, which may then also follow a separator."""

STEP_ITEMS, ROW_ITEMS, STEP_FUEL = 5_000, 250, 50_000
"""Limits on the parser's work per token and per position, and on the lexer's work, in the library's units. At its
documented speeds they amount to a few milliseconds, so that one text hardly delays the others in its step. The schemas
of `test_a_thousand_schemas` never reach them."""


class GrammarRoomError(Exception):
    """Grammars in use by running texts fill a budget: their owner's, or the total."""

    def __init__(self, limit: int, *, of_owner: bool) -> None:
        super().__init__(f"the grammars of running texts take almost {limit >> 20} MiB, the limit is reached")
        self.of_owner = of_owner


class SharedMatcher:
    """A matcher at the start of its grammar; texts use copies of it."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher
        self.spent = False
        """True after a copy has reached one of the library's limits: the lexer that all copies share may have
        stopped."""
        self.users: weakref.WeakSet[CompiledGrammar] = weakref.WeakSet()
        self.used = time.monotonic()  # time of the last request for it

    def spend(self) -> None:
        self.spent = True


class CompiledGrammar:
    """A compiled grammar for the texts of one owner. It stays compiled while this object lives."""

    def __init__(self, shared: SharedMatcher, grammar: Grammar, vocabulary: int) -> None:
        self._shared = shared
        self._grammar = grammar
        self._vocabulary = vocabulary

    def begin(self, generated: Sequence[int], end_tokens: frozenset[int]) -> TextGrammar:
        """Return the state of a text after these generated tokens; GrammarError if they do not fit."""
        shared = self._shared
        text = TextGrammar(shared.matcher.deep_copy(), self._grammar, end_tokens, self._vocabulary, shared.spend)
        text.commit(generated)
        if text.error is not None:
            raise text.error
        return text


_Key = tuple[str, Kind, tuple[str, ...]]


class GrammarCompiler:
    """Compiles grammars for a model's tokenizer, with logits of width `vocabulary`. Thread-safe.

    Compiled grammars are cached, up to `kept_bytes` in total and `owner_bytes` per named owner; the least recently used
    one is evicted first. A grammar in use counts until its texts release it.
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
        """`added`: tokens defined in other files of the model, in addition to the tokenizer's own."""
        self._file = tokenizer_file
        self._added = added
        self._vocabulary = vocabulary
        self._kept_bytes = kept_bytes
        self._owner_bytes = owner_bytes
        self._kept: OrderedDict[_Key, Future[SharedMatcher]] = OrderedDict()  # in order of eviction
        self._bytes: Counter[str] = Counter()  # of all existing matchers, by owner
        self._freed: deque[tuple[str, int]] = deque()  # (owner, bytes) of freed matchers that are still counted
        self._collected_at = -math.inf  # time of the last garbage collection
        self._untrimmed = 0  # bytes freed since malloc was last trimmed
        self._lock = threading.Lock()

    @classmethod
    def of(cls, directory: ModelDirectory) -> Self:
        """Return a compiler for the model in a directory."""
        return cls(directory.path / "tokenizer.json", directory.vocabulary, directory.tokenizer_files.to_add())

    def prepare(self) -> None:
        """Load the tokenizer at start-up. With 131,072 tokens this takes a second, mostly with the GIL held."""
        _ = self._tokenizer

    @property
    def bytes(self) -> int:
        """Bytes of all compiled grammars, including growth of their lexers."""
        with self._lock:
            self._settle()
            return self._bytes.total()

    def compile(self, grammar: Grammar, owner: str = "", weight: int = 0) -> CompiledGrammar:
        """Compile a grammar for texts of an owner; `weight` is its size in bytes before its lexer grows. GrammarError
        if it is invalid, too large, or matches no text; GrammarRoomError if there is no room. Takes a millisecond, or a
        second for the largest grammars, without the GIL. Concurrent calls for the same grammar share one
        compilation."""
        key, size = (owner, grammar.kind, grammar.source), weight + growth_bytes(grammar)
        if size > MAX_GRAMMAR_BYTES:
            raise GrammarError(
                f"takes up to {size >> 20} MiB compiled, must take at most {MAX_GRAMMAR_BYTES >> 20} MiB"
            )
        mine = False
        with self._lock:
            found = self._kept.pop(key, None)
            if found is None or ((ready := _ready(found)) is not None and ready.spent):
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
                # The callback may run while this thread holds the lock, so it must not take a lock.
                weakref.finalize(shared, self._freed.append, (owner, size)).atexit = False
                found.set_result(shared)
        shared = found.result()
        with self._lock:
            return self._used(shared, grammar)

    def kept(self, grammar: Grammar, owner: str = "") -> CompiledGrammar | None:
        """Return a grammar from the cache; None if it is not compiled."""
        key = owner, grammar.kind, grammar.source
        with self._lock:
            found = self._kept.get(key)
            shared = None if found is None else _ready(found)
            if shared is None or shared.spent:
                return None
            self._kept.move_to_end(key)
            return self._used(shared, grammar)

    def forget(self) -> None:
        """Evict all unused grammars."""
        with self._lock:
            self._evict(list(self._kept))
            self._settle()

    def _used(self, shared: SharedMatcher, grammar: Grammar) -> CompiledGrammar:
        """Return a grammar and mark it as used. The caller holds the lock."""
        compiled = CompiledGrammar(shared, grammar, self._vocabulary)
        shared.used = time.monotonic()
        shared.users.add(compiled)
        return compiled

    def _make_room(self, owner: str, size: int) -> None:
        """Evict grammars until one more of this size fits; GrammarRoomError if grammars in use leave no room. The
        caller holds the lock."""
        before = time.monotonic() - IDLE_SECONDS
        self._evict([key for key, found in self._kept.items() if _is_old(found, before)])
        self._settle()
        lacking = self._lacking(owner, size)
        if lacking is not None and self._collect():
            lacking = self._lacking(owner, size)
        if lacking is not None:
            raise lacking

    def _lacking(self, owner: str, size: int) -> GrammarRoomError | None:
        """Evict grammars until one more of this size fits; return the error if it does not. The caller holds the
        lock."""
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
        """Collect garbage: the token trees of ended sessions are cycles, which hold grammars until the next collection.
        A collection stops other threads for some milliseconds, so it runs at most once in COLLECT_SECONDS. Return True
        if it ran. The caller holds the lock."""
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
        """Evict the unused grammars among these; evicting one in use would free nothing."""
        for key in keys:
            if not _is_used(self._kept[key]):
                del self._kept[key]

    def _settle(self) -> None:
        """Deduct freed matchers from the counts. The caller holds the lock."""
        while self._freed:
            owner, size = self._freed.popleft()
            self._untrimmed += size
            self._bytes[owner] -= size
            if not self._bytes[owner]:
                del self._bytes[owner]

    def _trim(self) -> None:
        """Return memory to the system if much was freed."""
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
            matcher.compute_bitmask()  # fails if no token can begin a text
        if matcher.is_error():
            raise GrammarError(_shortened(matcher.get_error()))
        return matcher

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        """The library's view of the tokenizer. It has an artificial end token beyond the vocabulary, because each
        request has its own end tokens."""
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
            special_token_ids = [token for token, entry in added.items() if entry.special and token < end] + [end]

            def __call__(self, text: bytes | str) -> list[int]:
                text = text if isinstance(text, str) else text.decode(errors="replace")
                return list(tokenizer.encode(text, add_special_tokens=False).ids)

        return LLTokenizer(TokenizerWrapper(View()))


def _ready(found: Future[SharedMatcher]) -> SharedMatcher | None:
    """Return a compiled matcher; None until its compilation has ended, or if it failed."""
    return found.result() if found.done() and found.exception() is None else None


def _is_used(found: Future[SharedMatcher]) -> bool:
    """Return True if a text uses a grammar, or waits for its compilation."""
    shared = _ready(found)
    return not found.done() if shared is None else bool(shared.users)


def _is_old(found: Future[SharedMatcher], before: float) -> bool:
    """Return True if a grammar was last requested before this time."""
    shared = _ready(found)
    return shared is not None and shared.used < before


def _in_library_form(grammar: Grammar) -> str:
    (source, *_) = grammar.source
    try:
        match grammar.kind:
            case Kind.JSON_SCHEMA:
                return LLMatcher.grammar_from_json_schema(source, style_of(json.loads(source)))
            case Kind.REGEX:
                return LLMatcher.grammar_from_regex(source)
            case Kind.LARK:
                return LLMatcher.grammar_from_lark(source)
            case Kind.CHOICE:
                return LLMatcher.grammar_from_lark("start: " + " | ".join(map(lark_string, grammar.source)))
    except (ValueError, RecursionError) as error:
        raise GrammarError(_shortened(str(error))) from None


def style_of(schema: object) -> JsonCompileOptions:
    """Return the layout for what a schema's own `x-guidance` leaves open."""
    own = schema.get("x-guidance") if isinstance(schema, dict) else None
    if not isinstance(own, dict):
        return STYLE
    is_free = own.get("whitespace_flexible") is True or own.get("whitespace_pattern") is not None
    return FREE_STYLE if is_free else STYLE


def _shortened(problem: str) -> str:
    """Return the library's description of a problem as one short line."""
    if problem.startswith("NoExtension"):
        return "matches no text"
    first, *others = problem.splitlines() or [""]
    line = next((line for line in others if line.startswith("error: ")), first)  # a regex's other lines mark the place
    return "cannot be used: " + line[:MAX_PROBLEM_CHARACTERS]
