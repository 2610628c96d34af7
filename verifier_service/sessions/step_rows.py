"""A session's rows of a step: committed tokens and, below the root, candidates and a lookahead window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specdec.decoding.tree import Node
from specdec.engine.batch import Packer
from specdec.engine.kv.slots import Slots
from verifier_service.backend.result import Decision
from verifier_service.sessions.ngram import LookaheadRows


@dataclass(slots=True)
class TreeRows:
    """The rows of a step below a session's root."""

    candidates: list[Node]
    lookahead: LookaheadRows | None
    results: dict[int, int] = field(default_factory=dict)  # id(candidate) -> index among the results
    slots: dict[int, int] = field(default_factory=dict)  # id(node) -> slot of its key and value
    lookahead_results: list[int] = field(default_factory=list)  # indices among the results, one per query of the window


@dataclass(slots=True)
class ScheduledRows:
    """A session's rows of a step, and where to find the logits of the root."""

    count: int  # committed tokens among the rows
    root_row: int | None = None  # index among the results; None: a chunk of prompt before the root
    first_row: int = 0  # index of the first row in the batch; unused if the root's is the only one
    scored: Sequence[int] = ()  # indices among the results, of the rows that score the next tokens of the prompt
    tree: TreeRows | None = None
    drafted: bool = False  # expected a remote draft's candidates, and had some for the next token
    undrafted: bool = False  # expected them, and had none
    decision: Decision | None = None  # on its candidates; None: nothing to decide

    @property
    def rows(self) -> int:
        """The number of all rows, candidates and window included."""
        return self.count + (0 if self.tree is None else len(self.tree.slots))


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
    """Add rows for candidates and for a window, and a path of keys to each leaf. `candidates` are sorted, best first.

    `text`: the session's rows of committed tokens, ending with the root's row; `root_row`: index of the root's logits
    among the results; `text_slots`: the session's slots. Tree slots are popped from the end of `tree_slots`.

    The most probable path is written to the text's own slots, where its tokens belong if accepted. Only side branches
    need tree slots, and a copy if accepted.
    """
    tree = TreeRows(candidates, lookahead)
    base, principal, side = root.position + 1, list[Node](), list[Node]()
    last = root
    for node in candidates:  # best first, so the first child of `last` continues the most probable path
        if node.parent is last:
            last = node
            principal.append(node)
        else:
            side.append(node)
    rows = packer.add_rows([node.token for node in principal], base, text_slots[base : base + len(principal)])
    row_of = dict(zip(map(id, principal), rows, strict=True))
    tree.slots = dict(zip(map(id, principal), text_slots[base : base + len(principal)].tolist(), strict=True))
    tree.results = dict(zip(map(id, principal), map(packer.want, rows), strict=True))
    for node in side:
        tree.slots[id(node)] = slot = tree_slots.pop()
        row_of[id(node)] = row = packer.add_row(node.token, node.position, slot)
        tree.results[id(node)] = packer.want(row)
    if lookahead is not None:
        # The first level of a Jacobi window may be among the candidates.
        window_nodes = [node for node in lookahead.nodes if id(node) not in row_of]
        for node in window_nodes:
            tree.slots[id(node)] = slot = tree_slots.pop()
            row_of[id(node)] = packer.add_row(node.token, node.position, slot)
        side += window_nodes
        tree.lookahead_results = [_result(packer, root_row, tree, node, row_of) for node in lookahead.queried]
    packer.add_path(text_slots[: base + len(principal)], [*text, *rows])
    prefix, inner = text_slots[:base], {id(node.parent) for node in side}
    placed = set(map(id, principal))
    for leaf in side:
        if id(leaf) in inner:
            continue
        path = leaf.path()
        slots = [tree.slots[id(node)] for node in path]
        packer.add_branch(prefix, slots, [row_of[id(node)] for node in path if id(node) not in placed])
        placed.update(map(id, path))
    return tree


def _result(packer: Packer, root_row: int, tree: TreeRows, node: Node, row_of: dict[int, int]) -> int:
    """Return the index of a window node's logits among the results; the node may be the root or a candidate."""
    if node.parent is None:
        return root_row
    index = tree.results.get(id(node))
    return packer.want(row_of[id(node)]) if index is None else index
