"""Heads as a drafter: EAGLE-3 heads, a block draft or an MTP layer, run apart from their target.

Heads read fused features that the verifier sends (`Features`): one row for each token of the text except the last. Once
the last of these rows has arrived, a tree grows from it as in a verifier (`specdec/engine/heads/growth.py`), a level at
a time and for several texts concurrently. Nodes keep the children that they already have; the root's are ranked again.
Until that row arrives, the only candidates are those grown from earlier rows.

If rows are missing, the heads see the text only from the first row after the gap, and guess worse.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from torch import Tensor

from draft_service.children import Computed, chosen, give
from draft_service.drafter import Drafter, ExpansionError, FeatureFormat
from draft_service.session import DrafterSession, RootMove
from specdec.decoding.candidates import QueriedRow, with_confidence
from specdec.decoding.sampling import Rule
from specdec.decoding.tree import Node
from specdec.engine.heads.fusion import from_bytes
from specdec.engine.heads.growth import BEAM, HeadsReader, TreeAnchor
from specdec.engine.heads.text_memory import TextSlots
from specdec.engine.kv.slots import PoolFullError, Slots

log = structlog.get_logger()

MAX_TEXTS = 16
"""Maximum texts in a group, whose trees grow concurrently. A group's candidates are sent before the next group's trees
grow."""

MAX_AHEAD = 4096
"""Maximum tokens by which a text's rows may be ahead of its commits: commits are batched while drafting is paused."""


@dataclass
class FedText:
    """A session's rows: those that arrived, and those in the memory of the heads."""

    slots: TextSlots
    arrived: list[tuple[int, Tensor]] = field(default_factory=list)  # (first position, rows) not read yet
    end: int = 0  # position after the last row, read or not
    state: Tensor | None = None  # [d'] of the last row read
    grown: int = 0  # length of the text when its tree last grew
    turn: int = 0  # number of the group in which its tree last grew

    def add(self, first: int, rows: Tensor) -> None:
        """Add rows at consecutive positions. Known rows are skipped; after a gap, earlier rows not read yet are
        dropped."""
        known = self.end - first
        if known > 0:
            first, rows = self.end, rows[known:]
        if not len(rows):
            return
        if first > self.end:
            self.arrived.clear()
        self.arrived.append((first, rows))
        self.end = first + len(rows)

    def lose(self) -> None:
        self.arrived.clear()
        self.slots.release()
        self.end, self.state = 0, None


class TreeLevel(NamedTuple):
    """A level of a text's tree: its nodes that get children (the likeliest), and the places of their parents in the
    level above."""

    nodes: list[Node]
    origins: list[int]

    def below(self, session: DrafterSession) -> TreeLevel:
        """Return the next level: the likeliest children that may have children of their own."""
        ends, last = session.request.end_tokens, session.end - 1
        found = [
            (child.path_logprob(), origin, child)
            for origin, node in enumerate(self.nodes)
            for child in node.children.values()
            if child.position < last and child.token not in ends
        ]
        likely = [entry for entry in found if entry[0] >= session.policy.min_logprob]
        likely.sort(key=lambda entry: -entry[0])
        return TreeLevel([node for _, _, node in likely[:BEAM]], [origin for _, origin, _ in likely[:BEAM]])


class HeadsDrafter(Drafter):
    """The drafter that runs heads. `reader`: the heads and their memory; `features`: the format of their input."""

    rules = frozenset({Rule.COUPLED})
    features: FeatureFormat

    def __init__(self, reader: HeadsReader, features: FeatureFormat) -> None:
        self.features = features
        self._reader = reader
        self._texts: dict[DrafterSession, FedText] = {}
        self._turns = 0  # number of groups so far

    @property
    def slots(self) -> int:
        return self._reader.memory.pool.capacity - 1  # one is the padding slot

    @property
    def slots_used(self) -> int:
        return self._reader.memory.pool.used

    def open(self, session: DrafterSession) -> None:
        self._texts[session] = FedText(TextSlots(self._reader.memory))

    def add_features(self, session: DrafterSession, first: int, values: bytes) -> None:
        rows = from_bytes(values, self.features.width)
        end = min(session.end, session.tree.base + MAX_AHEAD)  # end of the rows that a tree of this text may read
        self._texts[session].add(first, rows[: max(0, end - first)])
        self._prune(session)

    def commit(self, session: DrafterSession, move: RootMove) -> None:
        self._prune(session)

    def _prune(self, session: DrafterSession) -> None:
        """Drop unread rows that no further tree will read, since they are outside the heads' context."""
        text = self._texts[session]
        least = session.tree.base - self._reader.context
        text.arrived = [(first, rows) for first, rows in text.arrived if first + len(rows) > least]

    def close(self, session: DrafterSession) -> None:
        self._texts.pop(session).slots.release()

    def best_logprob(self, session: DrafterSession) -> float:
        """Return the base class's value; -inf while the row of the token before the last is missing, and once the tree
        has grown from that row."""
        text, base = self._texts[session], session.tree.base
        was_read = text.arrived or text.state is not None  # False for a text of one token: no row precedes it
        if text.end != base - 1 or text.grown == base or not was_read:
            return -math.inf
        return session.best_logprob()

    def expand(self, sessions: Sequence[DrafterSession]) -> Mapping[DrafterSession, Exception]:
        group: list[DrafterSession] = []
        taken: list[tuple[DrafterSession, Node]] = []
        try:
            self._read(sessions, group)
            return self._grow(group, taken) if group else {}
        except Exception as error:  # the faulty session is unknown: all are retried
            for session, node in taken:
                if not node.children:
                    session.put_back(node)
            raise ExpansionError(group or sessions[:MAX_TEXTS], error) from error

    def recover(self) -> bool:
        try:
            return int(self._reader.tensor([1]).sum()) == 1
        except Exception as error:
            log.error("heads_fail", exc_info=error)
            return False

    # --- reading ------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _read(self, sessions: Sequence[DrafterSession], group: list[DrafterSession]) -> None:
        """Read the rows of the sessions that have waited longest for a tree, up to the number of trees that may grow
        concurrently. Append sessions with memory for their rows to `group`; the others restart with their next row."""
        reader, longest = self._reader, 0
        rows, positions, tokens, slots = list[Tensor](), list[int](), list[int](), list[Slots]()
        waiting = sorted(sessions, key=lambda session: self._texts[session].turn)
        for session in waiting[: min(MAX_TEXTS, reader.texts_at_once)]:
            text, committed = self._texts[session], session.tree.committed
            longest = max(longest, min(reader.context, len(committed)))
            if group and (len(group) + 1) * longest > reader.rows_at_once:
                break
            try:
                slots += [text.slots.take(first, len(part)) for first, part in text.arrived]
            except PoolFullError:
                text.lose()
                continue
            for first, part in text.arrived:
                rows.append(part)
                positions += range(first, first + len(part))
                tokens += committed[first + 1 : first + 1 + len(part)]
            group.append(session)
        if not rows:
            return
        texts = [self._texts[session] for session in group]
        try:
            reader.keep(tokens, positions, self._placed(torch.cat(rows)), np.concatenate(slots))
        except Exception:
            for text in texts:
                if text.arrived:
                    text.slots.release()  # the slots taken for these rows hold no data
            raise
        for text in texts:
            if text.arrived:
                text.state = text.arrived[-1][1][-1].clone()  # a view would keep the whole message
            text.arrived.clear()

    def _placed(self, rows: Tensor) -> Tensor:
        """Return rows on the heads' device, in their dtype."""
        heads = self._reader.heads
        return rows.to(heads.device, heads.dtype)

    # --- growing ------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _grow(
        self, group: Sequence[DrafterSession], taken: list[tuple[DrafterSession, Node]]
    ) -> dict[DrafterSession, Exception]:
        """Grow the trees of the sessions in `group`, and append the nodes that get children to `taken`. Return the
        sessions that cannot continue, with the reason."""
        reader, failed = self._reader, dict[DrafterSession, Exception]()
        depths = [self._depth(session) for session in group]
        growth = reader.growth([self._anchor(session) for session in group], max(depths))
        levels = [TreeLevel([session.tree.root], [0]) for session in group]
        for depth in range(max(depths)):
            tokens, origins = _padded(levels)
            found = growth.level(reader.tensor(tokens), reader.tensor(origins))
            own = found.logits.shape[1]  # rows of logits per text
            computed, places = list[Computed](), list[tuple[int, int]]()
            for number, (session, level) in enumerate(zip(group, levels, strict=True)):
                for place, node in enumerate(level.nodes if depth < depths[number] else ()):
                    # The root may already have children, guessed from earlier rows while it was a candidate.
                    if session.take_node(node) if depth else session.take_root():
                        taken.append((session, node))
                        row = QueriedRow(number * own + min(place, own - 1), session.query(node), session.vocabulary)
                        computed.append(Computed(session, node, row))
                        places.append((number, place))
            if computed:
                children = chosen(computed, reader.draft_logits(found.logits))
                if found.confidence is not None and children.candidates is not None:
                    of_texts, of_places = np.array(places).T
                    confident = with_confidence(children.candidates, found.confidence[of_texts, of_places])
                    children = children._replace(candidates=confident)
                failed |= give(children)
            levels = [level.below(session) for session, level in zip(group, levels, strict=True)]
            if not any(level.nodes for level in levels):
                break
        self._turns += 1
        for session in group:
            self._texts[session].grown, self._texts[session].turn = session.tree.base, self._turns
        return failed

    def _depth(self, session: DrafterSession) -> int:
        """Return the maximum levels of a session's tree."""
        return min(self._reader.depth, session.policy.deepest + 1, session.end - session.tree.base)

    def _anchor(self, session: DrafterSession) -> TreeAnchor:
        text, tree = self._texts[session], session.tree
        assert text.state is not None  # a row was read
        rows = text.slots.last(self._reader.context)
        return TreeAnchor(tree.committed[-1], tree.base, rows, self._placed(text.state))


def _padded(levels: Sequence[TreeLevel]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the tokens of levels and the places of their parents, [n, f] each, padded with 0."""
    shape = len(levels), max(len(level.nodes) for level in levels)
    tokens, origins = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    for number, level in enumerate(levels):
        count = len(level.nodes)
        tokens[number, :count], origins[number, :count] = [node.token for node in level.nodes], level.origins
    return tokens, origins
