"""One session at the verifier: its text, its memory, and one step of its verification."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from specdec.decoding.choice import Chooser, History, log_softmax
from specdec.decoding.tree import Node, TokenTree
from specdec.engine.batch import Packer
from specdec.engine.kv import Slots
from verifier_service.pace import Pace

DRAFT, CORRECTION, BONUS, PLAIN = 1, 2, 3, 4  # specdec.v1.TokenSource
STOP, LENGTH, CONTEXT = 1, 2, 3  # specdec.v1.FinishReason


@dataclass(frozen=True)
class Logprobs:
    """Of one token: its own log-probability, and the most probable tokens with theirs, best first."""

    chosen: float
    top_tokens: list[int]
    top_logprobs: list[float]


@dataclass
class Verdict:
    """What one step adds to a session."""

    base: int
    tokens: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    offered: int = 0
    accepted: int = 0
    finish: int = 0  # FinishReason; 0: goes on


@dataclass(frozen=True)
class SessionRequest:
    """A validated VerifyOpen."""

    prompt: list[int]
    generated: list[int]
    chooser: Chooser
    end_tokens: frozenset[int]
    max_tokens: int
    logprobs: int  # as in VerifyOpen.logprobs
    context: int


@dataclass
class Policy:
    """A validated VerifyPolicy."""

    speculate: bool
    max_candidates: int
    patience: float  # seconds


@dataclass
class _Planned:
    """Rows of a step under way: where to find the logits of the tip and of each candidate."""

    pending: int
    tip: int | None  # None: a prompt chunk that does not reach the tip
    results: dict[int, int]  # id(node) -> index among the results
    slots: dict[int, int]  # id(node) -> where its key and value were written


class Session:
    """Owned by the step loop's thread.

    `computed` counts the leading tokens of the committed text whose keys and values are in place; a
    session with all but the tip computed is decoding, one with fewer is in its prompt.
    """

    def __init__(self, request: SessionRequest, policy: Policy, max_nodes: int, vocabulary: int) -> None:
        self.request = request
        self.policy = policy
        text = request.prompt + request.generated
        self.end = min(len(request.prompt) + request.max_tokens, request.context)
        self.tree = TokenTree(
            text,
            vocabulary=vocabulary,
            last_position=self.end - 1,
            end_tokens=request.end_tokens,
            max_nodes=max_nodes,
        )
        self.history = (
            History(vocabulary, request.prompt, request.generated) if request.chooser.sampling.penalises else None
        )
        self.pace = Pace()
        self.slots: Slots = np.zeros(0, dtype=np.int64)
        self.computed = 0
        self.consumed = len(text)
        self._planned: _Planned | None = None
        self._awaited: float | None = None  # until when the step is put off

    @property
    def remaining_prompt(self) -> int:
        """Committed tokens before the tip that are not computed yet."""
        return self.tree.base - 1 - self.computed

    def extend(self, base: int, tokens: list[int], parents: list[int], scores: list[float], arrived: float) -> None:
        """Candidates came; ValueError if they cannot be."""
        self.tree.insert(base, tokens, parents, scores, origin=DRAFT)
        self.pace.arrived(base, arrived)
        self._awaited = None

    def wait_until(self, now: float, step_time: float) -> float | None:
        """Until when to sit out steps because better candidates are due; None: step now."""
        if not self.policy.speculate or self.policy.patience <= 0 or self.remaining_prompt:
            return None
        base = self.tree.base
        if self._awaited is not None and now >= self._awaited:
            self.pace.gave_up(base, now)
            self._awaited = None
            return None
        expected, leaf = self.tree.outlook(self.policy.max_candidates)
        self._awaited = self.pace.wait_until(
            base, now, expected=expected, leaf=leaf, step_time=step_time, patience=self.policy.patience
        )
        return self._awaited

    def plan(self, packer: Packer, scratch: list[int], prompt_budget: int) -> int:
        """Add this session's rows to a batch: committed tokens not yet computed, and candidates.

        At most `prompt_budget` committed tokens are taken. `scratch` holds free slots for side branches
        and is consumed from its end. Returns the number of rows.
        """
        tree = self.tree
        pending = min(tree.base - self.computed, prompt_budget)
        text = tree.committed[self.computed : self.computed + pending]
        own = self.slots
        rows = list(packer.add_rows(text, self.computed, own[self.computed : self.computed + pending]))
        if self.computed + pending < tree.base:
            packer.add_path(own[: self.computed + pending], rows)
            self._planned = _Planned(pending, None, {}, {})
            return pending
        planned = _Planned(pending, packer.want(rows[-1]), {}, {})
        budget = min(self.policy.max_candidates, len(scratch)) if self.policy.speculate else 0
        nodes = tree.best(budget) if budget else []
        if nodes:
            self._plan_tree(packer, nodes, rows, planned, scratch)
        else:
            packer.add_path(own[: tree.base], rows)
        self._planned = planned
        return pending + len(nodes)

    def _plan_tree(
        self, packer: Packer, nodes: list[Node], text_rows: list[int], planned: _Planned, scratch: list[int]
    ) -> None:
        """Rows for candidates, and one lane for each path among them.

        The most probable path is written where its tokens will stand if they are accepted; only side
        branches need scratch slots, and copying if one of them wins.
        """
        principal: Node | None = self.tree.root
        row_of: dict[int, int] = {}
        inner: set[int] = set()
        for node in nodes:  # best first, so the first child met is the principal path's next
            if node.parent is principal:
                principal, slot = node, int(self.slots[node.position])
            else:
                slot = scratch.pop()
            row = packer.add_row(node.token, node.position, slot)
            planned.slots[id(node)] = slot
            planned.results[id(node)] = packer.want(row)
            row_of[id(node)] = row
            inner.add(id(node.parent))
        prefix = self.slots[: self.tree.base]
        lane_rows = text_rows
        for leaf in nodes:
            if id(leaf) in inner:
                continue
            path = leaf.path()
            keys = np.concatenate([prefix, np.fromiter((planned.slots[id(n)] for n in path), dtype=np.int64)])
            lane_rows = lane_rows + [row_of.pop(id(n)) for n in path if id(n) in row_of]
            packer.add_path(keys, lane_rows)
            lane_rows = []

    def settle(self, logits: NDArray[np.float32]) -> tuple[Verdict | None, list[tuple[int, int]]]:
        """Read the step's results [n, vocabulary]: the verdict, and (from, to) slots to copy.

        The walk: take the target's own choice, go to the child that carries it, stop where there is
        none. No verdict for a chunk of the prompt.
        """
        planned, self._planned = self._planned, None
        if planned is None:
            raise RuntimeError("settle without plan")
        if planned.tip is None:
            self.computed += planned.pending
            return None, []
        tree, request = self.tree, self.request
        verdict = Verdict(base=tree.base, offered=len(planned.results))
        moves: list[tuple[int, int]] = []
        node, row = tree.root, planned.tip
        path: list[int] = []
        while True:
            row_logits = logits[row]
            position = node.position + 1
            token = request.chooser.choose(row_logits, position, self.history, path)
            if not np.isfinite(row_logits[token]):  # a NaN is every argmax's first choice
                raise FloatingPointError("the model's logits are not finite")
            child = node.children.get(token)
            if child is not None and id(child) not in planned.results:
                child = None  # beyond this step's budget
            verdict.tokens.append(token)
            verdict.sources.append(self._source(node, child, verdict.offered, planned))
            if request.logprobs:
                verdict.logprobs.append(_logprobs(row_logits, token, request.logprobs - 1))
            if child is not None:
                verdict.accepted += 1
                path.append(token)
                written, own = planned.slots[id(child)], int(self.slots[position])
                if written != own:
                    moves.append((written, own))
            verdict.finish = self._finish(token, position)
            if verdict.finish or child is None:
                break
            node, row = child, planned.results[id(child)]
        self.computed += planned.pending + verdict.accepted
        self._awaited = None
        self.pace.walked(verdict.accepted, CORRECTION in verdict.sources)
        tree.commit(verdict.tokens)
        if self.history is not None:
            self.history.extend(verdict.tokens)
        return verdict, moves

    def _source(self, node: Node, child: Node | None, offered: int, planned: _Planned) -> int:
        if child is not None:
            return child.origin
        if not offered:
            return PLAIN
        return CORRECTION if any(id(other) in planned.results for other in node.children.values()) else BONUS

    def _finish(self, token: int, position: int) -> int:
        if token in self.request.end_tokens:
            return STOP
        if position + 1 >= self.end:
            return LENGTH if self.end == len(self.request.prompt) + self.request.max_tokens else CONTEXT
        return 0


def _logprobs(logits: NDArray[np.float32], token: int, top: int) -> Logprobs:
    """Of the target's distribution before temperature and truncation."""
    values = log_softmax(logits)
    best: Sequence[int] = []
    if top:
        candidates = np.argpartition(values, len(values) - top)[-top:]
        best = candidates[np.lexsort((candidates, -values[candidates]))].tolist()
    return Logprobs(float(values[token]), list(best), [float(values[i]) for i in best])
