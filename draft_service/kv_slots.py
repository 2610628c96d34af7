"""The KV slots of a draft session: those of its committed text, as far as computed, and those of its computed nodes.

When a commit follows the tree, the nodes' slots become the text's without a copy.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from specdec.decoding.tree import Node
from specdec.engine.kv.slots import Slots


class SessionSlots:
    """The slots of one session, enough for its text and its maximum number of nodes. `text[i]` is the slot of the token
    at position i; `nodes` maps every computed node to its slot."""

    def __init__(self, slots: Slots) -> None:
        self.all = slots
        self.nodes: dict[Node, int] = {}
        self.computed = 0  # text tokens
        self._text = np.empty(len(slots), dtype=np.int64)
        self._free = slots[::-1].tolist()  # popped in ascending order: contiguous texts are read without a copy

    @property
    def text(self) -> Slots:
        """A view, not a copy: every pass reads the slots of the whole text."""
        return self._text[: self.computed]

    def add_text(self, count: int) -> Slots:
        """Take slots for the next `count` tokens of the text and return them."""
        begin, self.computed = self.computed, self.computed + count
        self._text[begin : self.computed] = [self._free.pop() for _ in range(count)]
        return self._text[begin : self.computed]

    def add_node(self, node: Node) -> int:
        """Take a slot for a node and return it."""
        slot: int = self._free.pop()
        self.nodes[node] = slot
        return slot

    def remove(self, text: int, nodes: Sequence[Node]) -> None:
        """Free the slots of the last `text` tokens and of these nodes, after a failed pass."""
        if text:
            self._free += self.text[-text:].tolist()
            self.computed -= text
        self._free += [self.nodes.pop(node) for node in nodes if node in self.nodes]

    def follow_root(self, followed: Sequence[Node], alive: Collection[Node]) -> None:
        """Move slots of `followed` nodes to the text, up to the first uncomputed one; free the slots of nodes not
        `alive`."""
        for node in followed:
            if node not in self.nodes:
                break
            self._text[self.computed] = self.nodes.pop(node)
            self.computed += 1
        self._free += [self.nodes.pop(node) for node in [node for node in self.nodes if node not in alive]]
