"""Helpers: texts made of pieces, and checks of a block pool's trees."""

from __future__ import annotations

import numpy as np

from specdec.engine.kv.blocks import BLOCK, BlockPool, BlockTable


def text(*pieces: tuple[int, int]) -> list[int]:
    """Return a text from pieces of (token, count)."""
    return [token for token, count in pieces for _ in range(count)]


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
    """Return the number of leading tokens cached in whole blocks, read from the tree so that it counts as no use."""
    node, count = pool._roots.get(scope), 0
    while node is not None:
        key = np.asarray(tokens[count : count + BLOCK], dtype=np.uint32).tobytes()
        node = node.children.get(key)
        count += BLOCK * (node is not None)
    return count
