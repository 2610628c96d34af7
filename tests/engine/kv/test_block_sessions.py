"""Block tables never mix up texts, scopes or owners, and the cache evicts in the right order.

A state machine lets many sessions of two scopes open, compute, speculate, trim, fail and close in a tiny pool. Two
oracles check it. The *memory* is that of a simulated engine: each slot records the text before its token, so that a
table with slots of another text shows immediately. The *register* is the plain specification of the cache: a dictionary
of whole prefixes with holders and time of last use.
"""

from __future__ import annotations

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
from tests.engine.kv.block_trees import nodes, text
from tests.examples import examples

NOTHING, GUESS = -1, -2  # contents of the memory besides texts


class Memory:
    """The engine's rows. Two tokens have equal rows only if their scopes and the texts up to them are equal."""

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
    twins: bool = False  # True: publishes no more until it closes
    filled: int = 0
    blocks: int = 0

    def prefix(self, block: int) -> tuple[bytes, tuple[int, ...]]:
        return self.scope, tuple(self.tokens[: (block + 1) * BLOCK])

    def block(self, index: int) -> int:
        return int(self.table.slots[index * BLOCK]) // BLOCK

    @property
    def lost(self) -> bool:
        return any(entry.lost for entry in [*self.chain, *self.copied])

    @property
    def copied(self) -> list[Entry]:
        return [self.origin] if self.origin else []


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
            # Forget the prefix and the copied entry, unless evicted since: then a newer entry may have the same name.
            first = [*session.chain[:1], *session.copied]
            known = [name for (_, name), entry in self.entries.items() if entry in first]
            for key, entry in list(self.entries.items()):
                if key[0] == session.scope and any(key[1][: len(name)] == name for name in known):
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
        """Open a session, compute its whole prompt, and optionally close it."""
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
TestSessions.settings = settings(max_examples=examples(50), stateful_step_count=40, deadline=None)
