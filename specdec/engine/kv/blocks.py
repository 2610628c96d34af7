"""The paged KV cache: a block table for each session, and prefix caching between sessions.

Pure book-keeping, for one thread and one model. The tensors belong to the engine; block b is their rows b * BLOCK .. b
* BLOCK + BLOCK - 1.

A full block is *published*: it becomes a node of its scope's prefix tree (`block_hashes.cache_scope`). The path from
the root to a node spells a text from its start; lookups compare tokens. A block is free, held by tables, or *cached*:
published but not held. A table that holds a node also holds all its ancestors, and releases them last. So the least
recently used cached node never has children, and evicting it shortens no other cached prefix.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from specdec.decoding.block_hashes import HASHED_TOKENS, next_hash, root_hash
from specdec.engine.kv.slots import PoolFullError, Slots

BLOCK = HASHED_TOKENS
"""Slots in a block, one per token."""


@dataclass(eq=False, slots=True)
class _Node:
    """A published block, or a scope's root (no parent, block 0)."""

    parent: _Node | None
    key: bytes  # its own BLOCK tokens; for a root, the scope
    block: int
    hash: int  # block hash of the text up to its end
    holders: int  # number of tables that hold this block
    suspect: bool = False  # may contain NaN: out of the tree, never cached again
    children: dict[bytes, _Node] = field(default_factory=dict)
    order: list[bytes] = field(default_factory=list)  # the children's keys, sorted

    def nearest(self, key: bytes) -> tuple[_Node | None, int]:
        """Return the child sharing the longest prefix with `key`, and that prefix's length in tokens."""
        # In sorted order the keys with the longest common prefix are the direct neighbours of `key`.
        place = bisect_left(self.order, key)
        best, longest = None, 0
        for other in self.order[max(0, place - 1) : place + 1]:
            same = np.frombuffer(key, np.uint32) == np.frombuffer(other[: len(key)], np.uint32)
            common = len(same) if same.all() else int(same.argmin())
            if common > longest:
                best, longest = self.children[other], common
        return best, longest


class BlockPool:
    """A pool of blocks 1..blocks-1. Block 0 contains the padding slot and has no owner."""

    def __init__(self, blocks: int) -> None:
        self.usable = blocks - 1
        self.free = blocks - 1
        self._map = bytearray(b"\0" + b"\1" * (blocks - 1))  # 1: free; searching bytes is fast
        self._roots: dict[bytes, _Node] = {}  # only scopes with published blocks
        self._cached: OrderedDict[_Node, None] = OrderedDict()  # least recently used first
        self._hashes: set[int] = set()  # of all nodes

    @property
    def cached(self) -> int:
        """Published blocks held by no table. They are evicted when free blocks run out."""
        return len(self._cached)

    @property
    def held(self) -> int:
        return self.usable - self.free - self.cached

    @property
    def available(self) -> int:
        """Blocks that tables can still take."""
        return self.free + self.cached

    def known_prefix(self, hashes: Iterable[int]) -> int:
        """Return the number of leading tokens, in whole blocks, that are already published for a text with these block
        hashes. May be called from any thread. The answer is a snapshot: the blocks are not held."""
        known = 0
        for block_hash in hashes:
            if block_hash not in self._hashes:
                break
            known += BLOCK
        return known

    def open(self, tokens: Sequence[int], scope: bytes = b"") -> tuple[BlockTable, Slots, Slots]:
        """Open a table that starts with the longest published prefix of tokens[:-1]; the last token must be computed.

        Returns the table and the (source, target) slots to copy before anything is written. If the prefix ends inside a
        block and memory allows, the table gets its own block for that part.
        """
        table = BlockTable(self, scope)
        start, limit = 0, len(tokens) - 1
        node, key = self._roots.get(table.scope), b""
        while node is not None:
            key = _key(tokens[start : min(start + BLOCK, limit)])
            child = node.children.get(key)
            if child is None:
                break
            self._hold(child)
            table._chain.append(child)
            table._blocks.append(child.block)
            node, start = child, start + BLOCK
        table.shared = start
        source, common = (None, 0) if node is None else node.nearest(key)
        if source is not None:
            self._hold(source)  # making room must not evict it; it also becomes most recently used
            if self.available:
                table._copied = [source]
                table.shared += common
                table._grow(1)
            self._release(source)
        table._lay()
        if not table._copied:
            return table, np.arange(0), np.arange(0)
        rows = np.arange(common)
        return table, table._copied[0].block * BLOCK + rows, table._blocks[-1] * BLOCK + rows

    def forget_prefixes(self) -> None:
        """Free all cached blocks, because their contents may be wrong."""
        while self._cached:
            self._evict()

    # --- for tables ---------------------------------------------------------------------------------

    def _evict(self) -> None:
        """Free the least recently used cached block."""
        node, _ = self._cached.popitem(last=False)
        self._unlink(node)
        self._give([node.block])

    def _take(self, count: int, after: int) -> list[int]:
        """Take `count` blocks: the free ones right after block `after`, then the first run that fits the rest, else
        several pieces."""
        if count > self.available:
            raise PoolFullError(count * BLOCK, self.available * BLOCK)
        while self.free < count:
            self._evict()
        taken: list[int] = []
        scattered = False
        while len(taken) < count:
            after += 1
            if after >= len(self._map) or not self._map[after]:
                # Not adjacent: jump to the first run that fits the rest, else to the lowest free block.
                run = -1 if scattered else self._map.find(b"\1" * (count - len(taken)))
                scattered = run < 0
                after = self._map.find(1) if scattered else run
            self._map[after] = 0
            taken.append(after)
        self.free -= count
        return taken

    def _give(self, blocks: list[int]) -> None:
        for block in blocks:
            self._map[block] = 1
        self.free += len(blocks)

    def _hold(self, node: _Node) -> None:
        if not node.holders:
            del self._cached[node]
        node.holders += 1

    def _release(self, node: _Node) -> list[int]:
        """Drop one holder of a node. If it was the last and the block may contain NaN, return the block."""
        node.holders -= 1
        if node.holders:
            return []
        if node.suspect:
            return [node.block]
        self._cached[node] = None
        return []

    def _root(self, scope: bytes) -> _Node:
        root = self._roots.get(scope)
        if root is None:
            root = self._roots[scope] = _Node(None, scope, 0, root_hash(scope), 0)
        return root

    def _publish(self, parent: _Node, key: bytes, block: int) -> _Node:
        node = _Node(parent, key, block, next_hash(parent.hash, key), holders=1)
        parent.children[key] = node
        self._hashes.add(node.hash)
        insort(parent.order, key)
        return node

    def _unlink(self, node: _Node) -> None:
        parent = node.parent
        if parent is None:
            return
        del parent.children[node.key]
        del parent.order[bisect_left(parent.order, node.key)]
        self._hashes.discard(node.hash)
        if parent.parent is None and not parent.children:
            del self._roots[parent.key]

    def _condemn(self, node: _Node) -> list[int]:
        """Forget a prefix and all its continuations, unless evicted since; return their unheld blocks."""
        if node.suspect or node.parent is None or node.parent.children.get(node.key) is not node:
            return []
        self._unlink(node)
        unheld: list[int] = []
        stack = [node]
        while stack:
            node = stack.pop()
            node.suspect = True
            self._hashes.discard(node.hash)
            stack += node.children.values()
            node.children.clear()
            if not node.holders:
                del self._cached[node]
                unheld.append(node.block)
        return unheld


class FreedBlocks:
    """Counts the blocks that become available when all tables added to it are closed."""

    def __init__(self) -> None:
        self.count = 0
        self._holders: Counter[_Node] = Counter()  # holders of a node among these tables

    def add(self, table: BlockTable) -> None:
        self.count += len(table._blocks) - len(table._chain)
        for node in table._chain:
            self._holders[node] += 1
            self.count += self._holders[node] == node.holders


class BlockTable:
    """One session's blocks by position: the published ones it holds, then its own.

    Blocks found by `BlockPool.open` are read-only. Positions from `shared` on are writable, in the table's own
    blocks.
    """

    def __init__(self, pool: BlockPool, scope: bytes) -> None:
        self.scope = scope
        self.shared = 0  # leading tokens found when opened, copied ones included
        self.slots: Slots = np.arange(0)  # slots[p] is the slot of token p
        self._pool = pool
        self._blocks: list[int] = []
        self._chain: list[_Node] = []  # nodes of the leading blocks, all in the tree
        self._late: list[bytes] = []  # keys of the full blocks after these, to be published by close()
        self._copied: list[_Node] = []  # node whose rows were copied, if any
        self._closed = False

    @property
    def exclusive(self) -> int:
        """Blocks that no other table holds. They become available when this table is closed."""
        # A table that holds a node holds all its ancestors, so nodes with a single holder are at the end.
        return len(self._blocks) - bisect_left(self._chain, True, key=lambda node: node.holders == 1)

    @property
    def share(self) -> float:
        """The sum over this table's blocks of 1 / (number of tables that hold the block)."""
        blocks, start = float(len(self._blocks) - len(self._chain)), 0
        while start < len(self._chain):  # holder counts never increase along the chain
            holders = self._chain[start].holders
            end = bisect_left(self._chain, True, lo=start, key=lambda node: node.holders < holders)
            blocks, start = blocks + (end - start) / holders, end
        return blocks

    def reserve(self, length: int) -> None:
        """Make room for `length` tokens. If memory is too short, raises PoolFullError and takes nothing.

        The new `slots` array starts with the old one.
        """
        if self._closed:
            raise RuntimeError("the table is closed")
        missing = -(-length // BLOCK) - len(self._blocks)
        if missing > 0:
            self._grow(missing)
            self._lay()

    def publish(self, tokens: Sequence[int], computed: int) -> None:
        """Publish the full blocks of tokens[:computed] for sharing. Their keys and values must be in place."""
        filled = computed // BLOCK
        known = len(self._chain) + len(self._late)
        if filled <= known:
            return
        if filled > len(self._blocks) or computed > len(tokens):
            raise ValueError(
                f"computed is {computed}, must be at most {len(tokens)} tokens and {len(self.slots)} slots"
            )
        for index in range(known, filled):
            key = _key(tokens[index * BLOCK : (index + 1) * BLOCK])
            if self._late or self._suspect or key in (parent := self._parent()).children:
                # Another table has published the same tokens. Continuing its prefix would mean holding its block in
                # addition to our own, or changing our slots midway. close() resolves this.
                self._late.append(key)
            else:
                self._chain.append(self._pool._publish(parent, key, self._blocks[index]))

    def close(self, *, wipe: bool = False) -> Slots:
        """Release all blocks; full blocks stay cached. Closing twice does nothing.

        `wipe`: the memory may contain NaN, and so may everything it was computed from or used for. The whole prefix,
        and the block that rows were copied from, are forgotten with all their continuations, including blocks held by
        other tables: new tables do not find them, and the close() of their other holders wipes too. Returns the slots
        to overwrite before the pool is used again (empty unless wiping), since a NaN spreads to the next rows that read
        it, masked or not.
        """
        pool, chain, own = self._pool, self._chain, self._blocks[len(self._chain) :]
        wipe = wipe or self._suspect
        spare = own
        if wipe:
            for node in chain[:1] + self._copied:  # the copied block need not continue the first
                spare += pool._condemn(node)
        elif self._late:
            spare = own[len(self._late) :]
            for key, block in zip(self._late, own, strict=False):
                parent = self._parent()
                twin = parent.children.get(key)
                if twin is None:
                    twin = pool._publish(parent, key, block)
                else:  # our slots are no longer read: the other table's copy replaces them
                    pool._hold(twin)
                    spare.append(block)
                chain.append(twin)
        for node in reversed(chain):  # descendants first: a prefix must be more recently used than its continuation
            spare += pool._release(node)
        pool._give(spare)
        self._closed = True
        self._blocks, self._chain, self._late, self._copied = [], [], [], []
        self._lay()
        return _slots(spare) if wipe else np.arange(0)

    @property
    def _suspect(self) -> bool:
        """True if a block held by this table, or a block it copied from, may contain NaN."""
        # Checking the last node of the chain is enough: a node is condemned with all its descendants.
        return any(node.suspect for node in self._chain[-1:] + self._copied)

    def _parent(self) -> _Node:
        return self._chain[-1] if self._chain else self._pool._root(self.scope)

    def _grow(self, count: int) -> None:
        # An empty table passes -1, not 0: otherwise block 1 would count as adjacent, and _take would not search for a
        # long enough run.
        self._blocks += self._pool._take(count, self._blocks[-1] if self._blocks else -1)

    def _lay(self) -> None:
        self.slots = _slots(self._blocks)


def _key(tokens: Sequence[int]) -> bytes:
    """Return tokens as bytes of fixed width: a common prefix of tokens is a common prefix of bytes."""
    return array("I", tokens).tobytes()


def _slots(blocks: list[int]) -> Slots:
    starts = np.asarray(blocks, dtype=np.int64) * BLOCK
    return np.add.outer(starts, np.arange(BLOCK)).reshape(-1)
