"""A session's rows of a step: the end of its text and, below the tip, candidates and a window."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from specdec.decoding.tree import Node
from specdec.engine.batch import Packer
from specdec.engine.kv.slots import Slots
from verifier_service.proposers.ngram import LookaheadRows


@dataclass(slots=True)
class TreeRows:
    """What a step computes below the tip."""

    candidates: list[Node]
    lookahead: LookaheadRows | None
    results: dict[int, int] = field(default_factory=dict)  # id(candidate) -> index among the results
    slots: dict[int, int] = field(default_factory=dict)  # id(node) -> where its key and value are written
    lookahead_results: list[int] = field(default_factory=list)  # for each place that the window asks about, likewise


@dataclass(slots=True)
class ScheduledRows:
    """Where to find the logits of the tip, and of what is below it."""

    count: int  # committed tokens among the rows
    root_row: int | None = None  # None: a piece of prompt that does not reach the tip
    tree: TreeRows | None = None


def plan_tree(
    packer: Packer,
    root: Node,
    root_row: int,
    text_slots: Slots,
    text: list[int],
    candidates: list[Node],
    tree_slots: list[int],
    lookahead: LookaheadRows | None,
) -> TreeRows:
    """Rows for candidates, best first, and for a window, and a path of keys to each leaf. `root_row` is the result of
    the tip's row, the last of the rows of the `text`; `text_slots` are the session's slots.

    The most probable path is written where its tokens will stand if they are accepted; only side branches
    need scratch slots, and copying if one of them wins.
    """
    tree = TreeRows(candidates, lookahead)
    principal = root
    row_of: dict[int, int] = {}
    inner: set[int] = set()
    for node in candidates:  # best first, so the first child met is the principal path's next
        if node.parent is principal:
            principal, slot = node, int(text_slots[node.position])
        else:
            slot = tree_slots.pop()
        row = packer.add_row(node.token, node.position, slot)
        tree.slots[id(node)] = slot
        tree.results[id(node)] = packer.want(row)
        row_of[id(node)] = row
        inner.add(id(node.parent))
    nodes = candidates
    if lookahead is not None:
        ahead = [
            node for node in lookahead.nodes if id(node) not in row_of
        ]  # a window's first level may be among the candidates
        for node in ahead:
            tree.slots[id(node)] = slot = tree_slots.pop()
            row_of[id(node)] = packer.add_row(node.token, node.position, slot)
            inner.add(id(node.parent))
        tree.lookahead_results = [_result(packer, root_row, tree, node, row_of) for node in lookahead.queried]
        nodes = candidates + ahead
    prefix, rows = text_slots[: root.position + 1], text
    for leaf in nodes:
        if id(leaf) in inner:
            continue
        path = leaf.path()
        keys = np.concatenate([prefix, [tree.slots[id(node)] for node in path]])
        packer.add_path(keys, rows + [row_of.pop(id(node)) for node in path if id(node) in row_of])
        rows = []
    return tree


def _result(packer: Packer, root_row: int, tree: TreeRows, node: Node, row_of: dict[int, int]) -> int:
    """Where a window's node finds its logits: it may be the tip, or a candidate."""
    if node.parent is None:
        return root_row
    known = tree.results.get(id(node))
    return packer.want(row_of[id(node)]) if known is None else known
