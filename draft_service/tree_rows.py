"""Rows of a packed batch for nodes of a token tree: each sees the text, its ancestors, and itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from specdec.decoding.tree import Node
from specdec.engine.batch import Packer
from specdec.engine.kv.slots import Slots


def add_nodes(packer: Packer, text: Slots, slots: Mapping[Node, int], nodes: Sequence[Node]) -> list[int]:
    """Add a row for each of these nodes, and return their row indices.

    `text` holds the slots of the committed text, which ends with the tree's root; `slots` those of the nodes and of
    their ancestors. All rows are one tree of the packer: its keys are the text and then the nodes, each once."""
    base = len(text)
    columns: dict[Node, int] = {}  # of the nodes and their ancestors, among the keys
    seen: list[list[int]] = []  # of each row, the columns of its path
    for node in nodes:
        path = node.path()
        seen.append([columns.setdefault(ancestor, base + len(columns)) for ancestor in path])
    visible = np.zeros((len(nodes), base + len(columns)), dtype=bool)
    visible[:, :base] = True
    for row, path_columns in enumerate(seen):
        visible[row, path_columns] = True
    keys = np.concatenate([text, [slots[ancestor] for ancestor in columns]])
    positions = np.concatenate([np.arange(base), [ancestor.position for ancestor in columns]])
    rows = [packer.add_row(node.token, node.position, slots[node]) for node in nodes]
    packer.add_tree(keys, positions, rows, visible)
    return rows
