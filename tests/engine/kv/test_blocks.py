"""Block tables never mix up texts, scopes or owners, and the cache evicts in the right order.

A state machine lets many sessions of two scopes open, compute, speculate, trim, fail and close in a tiny pool. Two
oracles check it. The *memory* is that of a simulated engine: each slot records the text before its token, so a table
with slots of another text is found at once. The *register* is the plain specification of the cache: a dictionary of
whole prefixes with holders and time of last use.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from specdec.decoding.block_hashes import block_hashes
from specdec.engine.kv.blocks import BLOCK, BlockPool, BlockTable
from specdec.engine.kv.slots import PoolFullError, Slots

NOTHING, GUESS = -1, -2  # contents of the memory besides texts


def text(*pieces: tuple[int, int]) -> list[int]:
    """Return a text from pieces of (token, count)."""
    return [token for token, count in pieces for _ in range(count)]


class Memory:
    """The engine's rows. Two tokens are the same row only if scope and text up to them are the same."""

    def __init__(self, blocks: int) -> None:
        self.rows = np.full(blocks * BLOCK, NOTHING)
        self.bad = np.zeros(blocks * BLOCK, dtype=bool)  # NaN
        self._names: dict[tuple[int, int | bytes], int] = {}

    def spell(self, scope: bytes, tokens: Sequence[int]) -> list[int]:
        name = self._name(NOTHING, scope)
        return [name := self._name(name, token) for token in tokens]

    def _name(self, before: int, token: int | bytes) -> int:
        return self._names.setdefault((before, token), len(self._names))

    def copy(self, source: Slots, target: Slots) -> None:
        self.rows[target] = self.rows[source]
        self.bad[target] = self.bad[source]

    def wipe(self, slots: Slots) -> None:
        self.rows[slots] = NOTHING
        self.bad[slots] = False


@dataclass(eq=False)
class Entry:
    """A published prefix."""

    block: int
    holders: int
    used: int = 0  # time of the last holder's release
    lost: bool = False


@dataclass(eq=False)
class Session:
    """A table, and its state in the register."""

    table: BlockTable
    scope: bytes
    tokens: list[int]
    computed: int
    origin: Entry | None
    chain: list[Entry] = field(default_factory=list)
    twins: bool = False  # publishes no more before it closes
    filled: int = 0
    blocks: int = 0

    def prefix(self, block: int) -> tuple[bytes, tuple[int, ...]]:
        return self.scope, tuple(self.tokens[: (block + 1) * BLOCK])

    def block(self, index: int) -> int:
        return int(self.table.slots[index * BLOCK]) // BLOCK

    @property
    def lost(self) -> bool:
        return any(entry.lost for entry in [*self.chain, *([self.origin] if self.origin else [])])


class Register:
    """The cache's expected content, as plainly as possible."""

    def __init__(self, blocks: int) -> None:
        self.usable = blocks - 1
        self.entries: dict[tuple[bytes, tuple[int, ...]], Entry] = {}
        self.sessions: list[Session] = []
        self.clock = 0

    @property
    def cached(self) -> int:
        return sum(not entry.holders for entry in self.entries.values())

    @property
    def held(self) -> int:
        entries = {entry for entry in self.entries.values() if entry.holders}
        lost = {entry for session in self.sessions for entry in session.chain}
        return len(entries | lost) + sum(session.blocks - len(session.chain) for session in self.sessions)

    @property
    def free(self) -> int:
        return self.usable - self.held - self.cached

    def match(self, scope: bytes, tokens: list[int]) -> tuple[list[Entry], list[Entry], int]:
        """Return whole prefixes, entries to copy rows from, and the number of rows."""
        tokens = tokens[:-1]
        chain: list[Entry] = []
        while (scope, tuple(tokens[: (len(chain) + 1) * BLOCK])) in self.entries:
            chain.append(self.entries[scope, tuple(tokens[: (len(chain) + 1) * BLOCK])])
            if len(chain) * BLOCK == len(tokens):
                break
        whole = len(chain) * BLOCK
        best: list[Entry] = []
        rows = 1
        for (owner, known), entry in self.entries.items():
            if owner == scope and len(known) == whole + BLOCK and known[:whole] == tuple(tokens[:whole]):
                common = 0
                while whole + common < len(tokens) and known[whole + common] == tokens[whole + common]:
                    common += 1
                if common > rows:
                    best, rows = [], common
                if common == rows:
                    best.append(entry)
        return chain, best, rows

    def make_room(self, count: int) -> None:
        while self.free < count:
            oldest = min((key for key in self.entries if not self.entries[key].holders), key=self._used)
            scope, known = oldest
            longer = [key for key in self.entries if key[0] == scope and key[1][: len(known)] == known]
            assert longer == [oldest], "a prefix would be forgotten before its continuation"
            del self.entries[oldest]

    def _used(self, key: tuple[bytes, tuple[int, ...]]) -> int:
        return self.entries[key].used

    def publish(self, session: Session) -> None:
        session.filled = max(session.filled, session.computed // BLOCK)
        while len(session.chain) < session.filled and not session.twins:
            key = session.prefix(len(session.chain))
            if session.lost or key in self.entries:
                session.twins = True
            else:
                self.entries[key] = Entry(session.block(len(session.chain)), 1)
                session.chain.append(self.entries[key])

    def close(self, session: Session, wipe: bool) -> None:
        if wipe or session.lost:
            # Unless evicted already, with another session's newer prefix under that name.
            known = session.chain and self.entries.get(session.prefix(0)) is session.chain[0]
            for key, entry in list(self.entries.items()):
                if known and key[0] == session.scope and key[1][:BLOCK] == tuple(session.tokens[:BLOCK]):
                    entry.lost = True
                    del self.entries[key]
        else:
            for block in range(len(session.chain), session.filled):
                entry = self.entries.setdefault(session.prefix(block), Entry(session.block(block), 0))
                entry.holders += 1
                session.chain.append(entry)
        for entry in reversed(session.chain):
            self.release(entry)
        self.sessions.remove(session)

    def release(self, entry: Entry) -> None:
        entry.holders -= 1
        self.clock += 1
        if not entry.holders:
            entry.used = self.clock


TEXTS = st.lists(st.tuples(st.integers(1, 2), st.sampled_from([1, 30, 63, 64, 65])), min_size=1, max_size=4)
SCOPES = st.sampled_from([b"", b"b"])


class Sessions(RuleBasedStateMachine):
    """All operations of sessions on a pool."""

    @initialize(blocks=st.integers(2, 12))
    def start(self, blocks: int) -> None:
        self.pool = BlockPool(blocks)
        self.memory = Memory(blocks)
        self.register = Register(blocks)

    @property
    def sessions(self) -> list[Session]:
        return self.register.sessions

    def pick(self, data: st.DataObject) -> Session:
        return data.draw(st.sampled_from(self.sessions))

    @rule(pieces=TEXTS, scope=SCOPES)
    def open(self, pieces: list[tuple[int, int]], scope: bytes) -> None:
        tokens = text(*pieces)
        chain, origins, rows = self.register.match(scope, tokens)
        table, source, target = self.pool.open(tokens, scope)
        session = Session(table, scope, tokens, table.shared, None, chain, blocks=len(chain), filled=len(chain))
        for entry in chain:
            entry.holders += 1
        self.sessions.append(session)
        if len(source):
            session.origin = next(entry for entry in origins if entry.block == source[0] // BLOCK)
            session.origin.holders += 1
            self.register.make_room(1)
            session.blocks += 1
            self.register.release(session.origin)
        else:
            unheld = any(not entry.holders for entry in origins)
            assert not origins or self.register.free + self.register.cached <= unheld
            rows = 0
        assert len(source) == len(target) == rows
        assert table.shared == len(chain) * BLOCK + rows
        assert target.tolist() == table.slots[len(chain) * BLOCK :][:rows].tolist()
        assert not self.memory.bad[table.slots[len(chain) * BLOCK :]].any()
        self.memory.copy(source, target)

    @rule(pieces=TEXTS, scope=SCOPES, stay=st.booleans())
    def visit(self, pieces: list[tuple[int, int]], scope: bytes, stay: bool) -> None:
        """Compute a session's whole prompt at once, and optionally close it."""
        self.open(pieces, scope)
        session = self.sessions[-1]
        self.make_room(session, len(session.tokens))
        self.write(session, len(session.tokens), fails=False)
        if not stay:
            self.end(session)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), ahead=st.sampled_from([1, 20, 64, 200]))
    def reserve(self, data: st.DataObject, ahead: int) -> None:
        session = self.pick(data)
        self.make_room(session, len(session.tokens) + ahead)

    def make_room(self, session: Session, length: int) -> None:
        table, before, available = session.table, session.table.slots.tolist(), self.pool.available
        missing = -(-length // BLOCK) - session.blocks
        if missing > available:
            with pytest.raises(PoolFullError) as caught:
                table.reserve(length)
            assert (caught.value.wanted, caught.value.free) == (missing * BLOCK, available * BLOCK)
            assert table.slots.tolist() == before
            return
        self.register.make_room(missing)
        table.reserve(length)
        session.blocks += max(0, missing)
        assert table.slots[: len(before)].tolist() == before
        new = table.slots[len(before) :]
        assert not self.memory.bad[new].any()
        self.memory.rows[new] = GUESS

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), count=st.sampled_from([1, 10, 64, 130]), fails=st.sampled_from([False] * 9 + [True]))
    def compute(self, data: st.DataObject, count: int, fails: bool) -> None:
        """Compute the next rows of a text, generating at its end, as far as there is room."""
        session = self.pick(data)
        end = min(session.computed + count, len(session.table.slots))
        while len(session.tokens) < end:
            session.tokens.append(data.draw(st.integers(1, 2)) if len(session.tokens) % 32 == 0 else 1)
        self.write(session, end, fails)

    def write(self, session: Session, end: int, fails: bool) -> None:
        table = session.table
        end = min(end, len(table.slots))
        written = table.slots[session.computed : end]
        for other in self.sessions:
            assert other is session or not set(other.table.slots.tolist()) & set(written.tolist())
        self.memory.rows[written] = self.memory.spell(session.scope, session.tokens[:end])[session.computed :]
        self.memory.bad[written] = fails or self.is_bad(session)
        session.computed = max(session.computed, end)
        table.publish(session.tokens, session.computed)
        self.register.publish(session)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        self.end(self.pick(data))

    def end(self, session: Session) -> None:
        wipe = self.is_bad(session)
        held = set(session.table.slots.tolist())
        lost = session.lost
        self.register.close(session, wipe)
        spoiled = session.table.close(wipe=wipe)
        assert len(set(spoiled.tolist())) == len(spoiled)
        assert wipe or lost or not len(spoiled)
        if wipe:
            others = {slot for other in self.sessions for slot in other.table.slots.tolist()}
            assert held - others <= set(spoiled.tolist())
            assert not others & set(spoiled.tolist())
        self.memory.wipe(spoiled)
        assert not len(session.table.close(wipe=True))

    def is_bad(self, session: Session) -> bool:
        return bool(self.memory.bad[session.table.slots[: session.computed]].any())

    @invariant()
    def everyone_reads_their_own_text(self) -> None:
        for session in self.sessions:
            rows = self.memory.rows[session.table.slots[: session.computed]]
            assert rows.tolist() == self.memory.spell(session.scope, session.tokens[: session.computed])

    @invariant()
    def hashes_tell_which_prefixes_are_known(self) -> None:
        texts = [(session.scope, session.tokens) for session in self.sessions]
        texts += [(scope, list(tokens)) for scope, tokens in self.register.entries]
        for scope, tokens in texts:
            blocks = len(tokens) // BLOCK
            known = (b for b in range(blocks) if (scope, tuple(tokens[: (b + 1) * BLOCK])) not in self.register.entries)
            assert self.pool.known_prefix(block_hashes(tokens, scope)) == BLOCK * next(known, blocks)

    @invariant()
    def counts(self) -> None:
        pool, register = self.pool, self.register
        assert (pool.free, pool.cached, pool.held) == (register.free, register.cached, register.held)
        assert pool.free + pool.cached + pool.held == pool.usable
        assert pool.available == pool.free + pool.cached
        for session in self.sessions:
            assert len(session.table.slots) == session.blocks * BLOCK
            assert session.table.slots.dtype == np.int64
            assert not session.blocks or session.table.slots.min() >= BLOCK

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for session in self.sessions:
            session.table.close()
        assert self.pool.held == 0
        everything, _, _ = self.pool.open([])
        everything.reserve(self.pool.usable * BLOCK)
        assert sorted(everything.slots.tolist()) == list(range(BLOCK, (self.pool.usable + 1) * BLOCK))
        assert nodes(self.pool) == 0
        assert not self.pool._roots
        assert not self.pool._hashes


TestSessions = Sessions.TestCase
TestSessions.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


def nodes(pool: BlockPool) -> int:
    """Return the number of nodes of all trees, without the roots; check their bookkeeping on the way."""
    count, stack = 0, list(pool._roots.values())
    while stack:
        node = stack.pop()
        assert node.order == sorted(node.children)
        assert all(child.parent is node for child in node.children.values())
        assert node.parent is None or bool(node.holders) != (node in pool._cached)
        count += node.parent is not None
        assert node.parent is None or node.hash in pool._hashes
        stack += node.children.values()
    return count


def filled(pool: BlockPool, tokens: list[int], scope: bytes = b"") -> BlockTable:
    """Return an open table with all of `tokens` computed."""
    table, _, _ = pool.open(tokens, scope)
    table.reserve(len(tokens))
    table.publish(tokens, len(tokens))
    return table


def known(pool: BlockPool, tokens: list[int], scope: bytes = b"") -> int:
    """Return the number of leading tokens cached in whole blocks, from the tree, without counting as a use."""
    node, count = pool._roots.get(scope), 0
    while node is not None:
        key = np.asarray(tokens[count : count + BLOCK], dtype=np.uint32).tobytes()
        node = node.children.get(key)
        count += BLOCK * (node is not None)
    return count


def test_the_last_token_is_always_computed() -> None:
    pool = BlockPool(10)
    tokens = text((1, 2 * BLOCK))
    filled(pool, tokens).close()
    again, source, target = pool.open(tokens)
    assert again.shared == 2 * BLOCK - 1
    assert len(source) == BLOCK - 1
    assert not set(source.tolist()) & set(target.tolist())
    longer, source, target = pool.open([*tokens, 1])
    assert longer.shared == 2 * BLOCK
    assert len(source) == len(target) == 0


@pytest.mark.parametrize("tokens", [[], [5], [5, 6]])
def test_a_short_text(tokens: list[int]) -> None:
    pool = BlockPool(4)
    table, source, target = pool.open(tokens)
    assert (table.shared, len(table.slots), len(source), len(target)) == (0, 0, 0, 0)
    table.publish(tokens, len(tokens))
    table.close()
    assert (pool.free, pool.cached) == (3, 0)


def test_the_copied_tail_is_the_longest_there_is() -> None:
    """Among many continuations, wherever the tokens differ."""
    pool = BlockPool(200)
    chance = random.Random(7)
    texts = [[chance.choice([0, 1, 255, 256, 2**32 - 1]) for _ in range(BLOCK)] for _ in range(100)]
    for tokens in texts:
        filled(pool, tokens).close()
    for _ in range(200):
        wanted = chance.choice(texts)[: chance.randrange(6)] + chance.choices([0, 1, 255, 256, 2**32 - 1], k=60)
        best = max(sum(a == b for a, b in common_beginning(tokens, wanted[:-1])) for tokens in texts)
        table, source, _ = pool.open(wanted)
        assert table.shared == len(source) == best
        table.close()


def common_beginning(left: list[int], right: list[int]) -> list[tuple[int, int]]:
    pairs = list(zip(left, right, strict=False))
    end = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    return pairs[:end]


def test_scopes_share_nothing() -> None:
    pool = BlockPool(10)
    tokens = text((1, 3 * BLOCK))
    filled(pool, tokens, b"a").close()
    assert pool.open(tokens, b"b")[0].shared == 0
    assert pool.open(tokens)[0].shared == 0
    assert pool.open(tokens, b"a")[0].shared == 3 * BLOCK - 1


def test_the_least_recently_used_goes_first_and_from_its_end() -> None:
    pool = BlockPool(7)
    texts = [text((token, 2 * BLOCK)) for token in (1, 2, 3)]
    for tokens in texts:
        filled(pool, tokens).close()
    touched, _, _ = pool.open([*texts[0], 9])
    touched.close()
    lengths: list[list[int]] = []
    table, _, _ = pool.open([])
    for blocks in range(1, 7):
        table.reserve(blocks * BLOCK)
        lengths.append([known(pool, tokens) // BLOCK for tokens in texts])
    assert lengths == [[2, 1, 2], [2, 0, 2], [2, 0, 1], [2, 0, 0], [1, 0, 0], [0, 0, 0]]


def test_copying_counts_as_use_and_its_source_is_not_evicted_for_it() -> None:
    pool = BlockPool(3)
    filled(pool, text((1, BLOCK))).close()
    filled(pool, text((2, BLOCK))).close()
    table, source, _ = pool.open(text((1, 30)))
    assert (table.shared, len(source)) == (29, 29)
    assert known(pool, text((1, BLOCK))) == BLOCK
    assert known(pool, text((2, BLOCK))) == 0


def test_no_room_for_a_copy_is_no_error() -> None:
    """The only evictable block is the one to copy from."""
    pool = BlockPool(3)
    filled(pool, text((1, BLOCK))).close()
    table = filled(pool, text((2, 10)))
    other, source, target = pool.open(text((1, 30)))
    assert (other.shared, len(source), len(target), len(other.slots)) == (0, 0, 0, 0)
    assert (pool.held, pool.cached, pool.free) == (1, 1, 0)
    table.close()


def test_held_blocks_are_never_evicted() -> None:
    pool = BlockPool(5)
    tokens = text((1, 2 * BLOCK), (2, BLOCK))
    filled(pool, tokens).close()
    holder, _, _ = pool.open(tokens[: 2 * BLOCK + 1])
    assert holder.shared == 2 * BLOCK
    other, _, _ = pool.open([])
    with pytest.raises(PoolFullError, match="192 key/value slots wanted, 128 free"):
        other.reserve(3 * BLOCK)
    assert (pool.free, pool.cached) == (1, 1)
    other.reserve(2 * BLOCK)
    assert not set(other.slots.tolist()) & set(holder.slots.tolist())


def test_slots_are_contiguous_where_they_can_be() -> None:
    pool = BlockPool(10)
    first, _, _ = pool.open([])
    first.reserve(1)
    hole, _, _ = pool.open([])
    hole.reserve(1)
    second, _, _ = pool.open([])
    second.reserve(2 * BLOCK)
    hole.close()
    third, _, _ = pool.open([])
    third.reserve(3 * BLOCK)  # not in the hole
    first.reserve(2 * BLOCK)  # right behind itself
    third.reserve(5 * BLOCK)
    for table, block in (first, 1), (second, 3), (third, 5):
        assert table.slots.tolist() == list(range(block * BLOCK, block * BLOCK + len(table.slots)))
    assert pool.free == 0
    second.close()
    first.close()
    scattered, _, _ = pool.open([])
    scattered.reserve(4 * BLOCK)
    third.close()
    assert scattered.slots.tolist() == list(range(BLOCK, 5 * BLOCK))


def test_a_table_grows_right_behind_itself_though_there_is_room_before() -> None:
    pool = BlockPool(6)
    hole, table, behind = (pool.open([])[0] for _ in range(3))
    hole.reserve(BLOCK)
    table.reserve(BLOCK)
    behind.reserve(BLOCK)
    hole.close()
    behind.close()
    for blocks in (2, 3):
        table.reserve(blocks * BLOCK)
    assert table.slots.tolist() == list(range(2 * BLOCK, 5 * BLOCK))
    other, _, _ = pool.open([])
    other.reserve(2 * BLOCK)
    assert other.slots.tolist() == [*range(BLOCK, 2 * BLOCK), *range(5 * BLOCK, 6 * BLOCK)]


def test_an_empty_table_does_not_start_in_a_hole() -> None:
    pool = BlockPool(6)
    hole, table, other = (pool.open([])[0] for _ in range(3))
    hole.reserve(BLOCK)
    table.reserve(BLOCK)
    hole.close()
    other.reserve(3 * BLOCK)
    assert other.slots.tolist() == list(range(3 * BLOCK, 6 * BLOCK))


def test_two_sessions_with_the_same_prompt() -> None:
    """Each computes it; while open the second keeps its own copy, afterwards one copy stays and both continuations."""
    pool = BlockPool(12)
    prompt = text((1, 2 * BLOCK))
    tables = [pool.open(prompt)[0] for _ in range(2)]
    answers = [prompt + text((answer, 2 * BLOCK)) for answer in (5, 6)]
    for table, tokens in zip(tables, answers, strict=True):
        table.reserve(len(tokens))
        before = table.slots.tolist()
        table.publish(tokens, 2 * BLOCK)
        table.publish(tokens, 4 * BLOCK)
        assert table.slots.tolist() == before
    assert (pool.held, nodes(pool)) == (8, 4)
    tables[1].close()
    assert (pool.held, pool.cached, nodes(pool)) == (4, 2, 6)
    tables[0].close()
    assert (pool.held, pool.cached, nodes(pool)) == (0, 6, 6)
    assert [known(pool, tokens) for tokens in answers] == [4 * BLOCK, 4 * BLOCK]


def test_a_copy_takes_the_place_of_the_evicted_original() -> None:
    pool = BlockPool(5)
    prompt = text((1, 2 * BLOCK))
    first, _, _ = pool.open(prompt)
    second, _, _ = pool.open(prompt)
    for table in (first, second):
        table.reserve(len(prompt))
        table.publish(prompt, len(prompt))
    first.close()
    second.reserve(4 * BLOCK)
    assert nodes(pool) == 0
    second.close()
    assert known(pool, prompt) == 2 * BLOCK
    assert (pool.cached, pool.free) == (2, 2)


def test_publishing_touches_no_token_until_a_block_is_filled() -> None:
    class Watched(list[int]):
        reads = 0

        def __getitem__(self, index):  # type: ignore[no-untyped-def]
            self.reads += 1
            return super().__getitem__(index)

    pool = BlockPool(10)
    tokens = Watched(text((1, 5 * BLOCK)))
    table, _, _ = pool.open([])
    table.reserve(len(tokens))
    for computed in range(len(tokens) + 1):
        table.publish(tokens, computed)
    assert tokens.reads == 5


def test_misuse_is_refused() -> None:
    pool = BlockPool(4)
    table, _, _ = pool.open([1])
    with pytest.raises(ValueError, match="64 tokens computed, of 64, in 0 slots"):
        table.publish([1] * BLOCK, BLOCK)
    table.reserve(BLOCK)
    with pytest.raises(ValueError, match="64 tokens computed, of 63, in 64 slots"):
        table.publish([1] * (BLOCK - 1), BLOCK)
    table.close()
    with pytest.raises(RuntimeError, match="closed"):
        table.reserve(1)


def test_wiping_forgets_the_prefix_and_its_continuations_for_everyone() -> None:
    pool = BlockPool(20)
    prompt = text((1, 2 * BLOCK))
    failing = filled(pool, prompt)
    continuation = prompt + text((2, BLOCK))
    filled(pool, continuation).close()  # cached
    holder = filled(pool, prompt + text((3, BLOCK)))
    copier, source, _ = pool.open(text((1, BLOCK + 30)))
    assert len(source) == 29
    filled(pool, text((9, BLOCK))).close()
    slots = {name: set(table.slots.tolist()) for name, table in [("holder", holder), ("copier", copier)]}

    spoiled = set(failing.close(wipe=True).tolist())
    assert len(spoiled) == BLOCK  # the cached continuation; the prompt has holders
    assert not spoiled & (slots["holder"] | slots["copier"])
    assert known(pool, continuation) == 0
    assert known(pool, text((9, BLOCK))) == BLOCK
    fresh, source, _ = pool.open(continuation)
    assert (fresh.shared, len(source)) == (0, 0)

    holder.reserve(5 * BLOCK)
    tokens = prompt + text((3, 3 * BLOCK))
    holder.publish(tokens, len(tokens))  # it cannot be found
    assert known(pool, tokens) == 0
    spoiled = set(holder.close().tolist())
    assert len(spoiled) == 4 * BLOCK - BLOCK + BLOCK  # all of its own except the block still held by the copier
    assert not spoiled & slots["copier"]
    spoiled = set(copier.close().tolist())
    assert slots["copier"] <= spoiled
    fresh.close()
    assert (pool.held, pool.cached) == (0, 1)


def test_a_table_is_wiped_if_the_rows_it_copied_are_suspect() -> None:
    pool = BlockPool(10)
    failing = filled(pool, text((1, BLOCK)))
    copier, source, _ = pool.open(text((1, 30)))
    assert len(source) == 29
    failing.close(wipe=True)
    copier.publish(text((1, 30), (2, 34)), BLOCK)
    assert nodes(pool) == 0
    own = copier.slots.tolist()
    assert copier.close().tolist() == own
    assert (pool.held, pool.cached) == (0, 0)


def test_after_a_plain_close_there_is_nothing_to_overwrite() -> None:
    pool = BlockPool(10)
    assert len(filled(pool, text((1, 3 * BLOCK + 5))).close()) == 0
    assert (pool.cached, pool.free) == (3, 6)


def test_nothing_grows_over_many_sessions() -> None:
    """With ever new scopes and texts, some wiped."""
    pool = BlockPool(9)
    for number in range(10_000):
        tokens = [number] * (BLOCK * (1 + number % 3) + 1)
        filled(pool, tokens, scope=f"tenant {number % 5000}".encode()).close(wipe=number % 100 == 0)
        if number % 500 == 0:
            assert nodes(pool) == pool.cached == len(pool._cached)
            assert len(pool._roots) <= pool.cached
    assert pool.held == 0
    assert pool.free + pool.cached == pool.usable
