"""One session at the verifier: its text, its memory, and one step of its verification."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from specdec.decoding.choice import Ask, Chooser
from specdec.decoding.logprobs import Logprobs
from specdec.decoding.lookahead import Lookahead
from specdec.decoding.processing import History
from specdec.decoding.proposal import Proposal
from specdec.decoding.sampling import Rule
from specdec.decoding.suffix import Tokens
from specdec.decoding.tree import Node, Paths, TokenTree
from specdec.engine.batch import Packer
from specdec.engine.blocks import BLOCK, BlockPool, BlockTable
from specdec.engine.kv import PoolFullError, Slots
from specdec.serving import checksum
from verifier_service.guesses import MOST_NODES, Foresight, Guesser
from verifier_service.pace import Pace, Prospect

DRAFT, CORRECTION, BONUS, PLAIN = 1, 2, 3, 4  # specdec.v1.TokenSource
STOP, LENGTH, CONTEXT = 1, 2, 3  # specdec.v1.FinishReason


@dataclass
class Verdict:
    """What a step, or several, add to a session."""

    base: int
    offered: int
    tokens: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    accepted: int = 0
    finish: int = 0  # FinishReason; 0: goes on
    steps: int = 1
    checksum: int = 0  # as in Commit

    def joined(self, later: Verdict) -> Verdict:
        """This verdict and the one of the steps that followed."""
        return Verdict(
            base=self.base,
            offered=self.offered + later.offered,
            tokens=self.tokens + later.tokens,
            sources=self.sources + later.sources,
            logprobs=self.logprobs + later.logprobs,
            accepted=self.accepted + later.accepted,
            finish=later.finish,
            steps=self.steps + later.steps,
            checksum=later.checksum,
        )


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
    tenant: str = ""
    checksum: int = 0  # of the VerifyOpen
    unhurried: bool = False  # nobody reads along


@dataclass
class Policy:
    """A validated VerifyPolicy."""

    speculate: bool  # with a draft
    max_candidates: int
    patience: float  # seconds
    always: bool = False  # whether or not it pays
    guess: bool = False  # without one as well
    lookahead: Lookahead | None = None  # the window that is wanted, whether or not it pays; None: one that pays


@dataclass
class Planned:
    """A session's rows of a step under way: where to find the logits of the tip and of each candidate."""

    count: int  # committed tokens among them
    tip: int | None = None  # None: a piece of prompt that does not reach the tip
    results: dict[int, int] = field(default_factory=dict)  # id(node) -> index among the results
    slots: dict[int, int] = field(default_factory=dict)  # id(node) -> where its key and value are written
    candidates: list[Node] = field(default_factory=list)
    foresight: Foresight | None = None
    foreseen: list[int] = field(default_factory=list)  # for each place it asks about, an index among the results


class Session:
    """Owned by the step loop's thread.

    `computed` counts the leading tokens of the committed text whose keys and values are in place; a session
    with all but the tip computed is decoding, one with fewer is in its prompt. One without memory has nothing
    computed and waits.
    """

    def __init__(self, request: SessionRequest, policy: Policy, max_nodes: int, vocabulary: int) -> None:
        self.request = request
        self.policy = policy
        self._vocabulary = vocabulary
        text = request.prompt + request.generated
        self.end = min(len(request.prompt) + request.max_tokens, request.context)
        self.tree = TokenTree(
            text,
            vocabulary=vocabulary,
            last_position=self.end - 1,
            end_tokens=request.end_tokens,
            max_nodes=max_nodes + MOST_NODES,
            sampled=request.chooser.rule is Rule.REJECTION,
        )
        self.history = (
            History(vocabulary, request.prompt, request.generated) if request.chooser.sampling.penalises else None
        )
        self.pace = Pace()
        self.guesser = Guesser(text, self.end, request.chooser)
        self._checksum = request.checksum
        self.table: BlockTable | None = None
        self.computed = 0
        self.found = 0  # tokens that were in memory already when it was first given some
        self.consumed = len(text)
        self._outlook: tuple[float, float] | None = None  # of the tree as it is

    @property
    def remaining_prompt(self) -> int:
        """Committed tokens before the tip that are not computed yet."""
        return self.tree.base - 1 - self.computed

    @property
    def contrasts(self) -> bool:
        """Whether no token can be chosen without the draft's distribution at its place."""
        return self.request.chooser.rule is Rule.CONTRASTIVE

    @property
    def computable(self) -> int:
        """Committed tokens that a step can take: all but, while its draft is silent, the tip of a session that
        contrasts."""
        return self.remaining_prompt + (not self.contrasts or self.tree.root.row is not None)

    @property
    def slots(self) -> Slots:
        assert self.table is not None  # a session without memory is in no step
        return self.table.slots

    # --- memory -------------------------------------------------------------------------------------

    def settle_in(self, pool: BlockPool, spare: int = 0) -> tuple[Slots, Slots]:
        """Take memory for the text, and leave `spare` blocks to others; PoolFullError, and none taken, if there is
        too little. Rows (from, to) to copy before the next step."""
        table, source, target = pool.open(self.tree.committed, self.request.tenant)
        missing = max(0, self.tree.base - len(table.slots))
        try:
            if -(-missing // BLOCK) + spare > pool.available:
                raise PoolFullError(missing + spare * BLOCK, pool.available * BLOCK)
            table.reserve(self.tree.base)
        except Exception:
            table.close()
            raise
        self.table, self.computed = table, table.shared
        return source, target

    def leave(self, *, wipe: bool = False) -> Slots:
        """Give the memory back; the text stays, and can be computed anew. Slots to overwrite if wiping."""
        if self.table is None:
            return np.arange(0)
        spare = self.table.close(wipe=wipe)
        self.table, self.computed = None, 0
        return spare

    def publish(self) -> None:
        """Let others share what has been computed."""
        if self.table is not None:
            self.table.publish(self.tree.committed, self.computed)

    # --- candidates ---------------------------------------------------------------------------------

    def extend(self, base: int, paths: Paths, arrived: float, held: float = 0.0) -> None:
        """Candidates came, from a draft that had known of `base` for so many seconds, if it says so; ValueError if they
        cannot be."""
        rule = self.request.chooser.rule
        rows = [(parent, row) for parent, row in paths.rows if row.fits(rule, self._vocabulary)]
        self.tree.insert(base, paths._replace(rows=rows), origin=DRAFT)
        self.pace.arrived(base, arrived, held)
        self._outlook = None

    def usable(self, node: Node) -> bool:
        """Whether verifying a candidate can bring anything: where tokens are contrasted, one without the draft's
        distribution below it is a place at which nothing can be chosen."""
        return not self.contrasts or node.row is not None

    def adopt(self, policy: Policy) -> None:
        """Speculate otherwise from now on."""
        self.policy = policy
        self._outlook = None

    @property
    def guesses(self) -> bool:
        """Whether it may have candidates that come of no draft. Where they are drawn they would take the place of
        better ones; where tokens are contrasted nothing can be chosen below them."""
        rule = self.request.chooser.rule
        return self.policy.guess and (rule is Rule.COUPLED or (rule is Rule.REJECTION and not self.policy.speculate))

    def guess(self, price: float, shared: Tokens | None) -> None:
        """Put its own candidates into the tree, once for each length of the text; `shared` are texts of others."""
        sampled, every = self.request.chooser.rule is Rule.REJECTION, self.policy.lookahead is not None
        if self.guesser.propose(self.tree, price, shared, every=every, sampled=sampled):
            self._outlook = None

    def look_ahead(self, size: Lookahead | None) -> Foresight | None:
        """A lookahead window of this size for the coming step, if any."""
        if size is None or (size.ngram == 2 and self.request.chooser.rule is Rule.REJECTION):
            self.guesser.look_away()  # a trunk that is not drawn cannot be accepted
            return None
        return self.guesser.look_ahead(self.tree, size)

    @property
    def drafted(self) -> bool:
        """Whether a draft's candidates for the next token are here; what the session guessed itself does not count."""
        return any(node.origin == DRAFT for node in self.tree.root.children.values())

    @property
    def allowance(self) -> int:
        """Candidates it may have in a step."""
        if self.remaining_prompt or not (self.policy.speculate or self.guesses):
            return 0
        return self.policy.max_candidates

    def offers(self) -> Iterator[tuple[float, Node]]:
        """The candidates it would like to have in a step, best first, each with its reach."""
        return islice(self.tree.by_reach(self.usable), self.allowance)

    def prospect(self, now: float, price: float) -> Prospect:
        """What it would bring to a step now, and what it has to hope for, a row more costing `price` tokens."""
        if self._outlook is None:
            self._outlook = self.tree.outlook(self.policy.max_candidates, self.usable)
        expected, leaf = self._outlook
        if self.policy.patience <= 0:
            return Prospect(expected)
        return self.pace.prospect(
            self.tree.base, now, expected=expected, leaf=leaf, price=price, patience=self.policy.patience
        )

    # --- a step -------------------------------------------------------------------------------------

    def plan(
        self,
        packer: Packer,
        count: int,
        nodes: list[Node],
        scratch: list[int],
        foresight: Foresight | None = None,
    ) -> Planned:
        """Add rows to a batch: `count` committed tokens that are not computed yet and, if the tip is the last of
        them, candidates, best first, as far as there is room to accept them, and a window. `scratch` holds free slots
        for side branches; its end is used up."""
        start, end = self.computed, self.computed + count
        own = self.slots
        nodes = [node for node in nodes if node.position < len(own)]
        rows = packer.add_rows(self.tree.committed[start:end], start, own[start:end])
        planned = Planned(count)
        if end == self.tree.base:
            planned.tip = packer.want(rows[-1])
        if planned.tip is not None and (nodes or foresight):
            self._plan_tree(packer, nodes, list(rows), planned, scratch, foresight)
        else:
            packer.add_path(own[:end], rows)
        return planned

    def _plan_tree(
        self,
        packer: Packer,
        nodes: list[Node],
        rows: list[int],
        planned: Planned,
        scratch: list[int],
        foresight: Foresight | None,
    ) -> None:
        """Rows for candidates and a window, and a path of keys to each leaf.

        The most probable path is written where its tokens will stand if they are accepted; only side branches
        need scratch slots, and copying if one of them wins.
        """
        own = self.slots
        planned.candidates = nodes
        principal: Node | None = self.tree.root
        row_of: dict[int, int] = {}
        inner: set[int] = set()
        for node in nodes:  # best first, so the first child met is the principal path's next
            if node.parent is principal:
                principal, slot = node, int(own[node.position])
            else:
                slot = scratch.pop()
            row = packer.add_row(node.token, node.position, slot)
            planned.slots[id(node)] = slot
            planned.results[id(node)] = packer.want(row)
            row_of[id(node)] = row
            inner.add(id(node.parent))
        if foresight is not None:
            ahead = [node for node in foresight.nodes if id(node) not in row_of]  # a trunk may be among the candidates
            for node in ahead:
                planned.slots[id(node)] = slot = scratch.pop()
                row_of[id(node)] = packer.add_row(node.token, node.position, slot)
                inner.add(id(node.parent))
            planned.foresight = foresight
            planned.foreseen = [_result(packer, planned, node, row_of) for node in foresight.asked]
            nodes = nodes + ahead
        prefix = own[: self.tree.base]
        for leaf in nodes:
            if id(leaf) in inner:
                continue
            path = leaf.path()
            keys = np.concatenate([prefix, [planned.slots[id(node)] for node in path]])
            rows += [row_of.pop(id(node)) for node in path if id(node) in row_of]
            packer.add_path(keys, rows)
            rows = []

    def asks_ahead(self, planned: Planned) -> Iterator[Ask]:
        """What is to be chosen below the window of a step."""
        assert planned.foresight is not None
        return self.guesser.asks(planned.foresight, self.history)

    def settle(self, descent: Descent, now: float) -> Verdict:
        """Take what the walk has found into the text."""
        verdict = descent.verdict
        self.computed += descent.planned.count + verdict.accepted
        self.pace.walked(verdict.accepted, CORRECTION in verdict.sources)
        self.tree.commit(verdict.tokens)
        self.pace.committed(self.tree.base, now)
        self.guesser.extend(verdict.tokens, verdict.sources)
        self._outlook = None
        if self.history is not None:
            self.history.extend(verdict.tokens)
        self._checksum = verdict.checksum = checksum.extended(self._checksum, verdict.tokens, verdict.finish)
        return verdict

    def finish(self, token: int, position: int) -> int:
        """Whether the text ends with this token, and why."""
        if token in self.request.end_tokens:
            return STOP
        if position + 1 >= self.end:
            return LENGTH if self.end == len(self.request.prompt) + self.request.max_tokens else CONTEXT
        return 0


def _result(packer: Packer, planned: Planned, node: Node, row_of: dict[int, int]) -> int:
    """Where a window's node finds its logits: it may be the tip, or a candidate."""
    if node.parent is None:
        assert planned.tip is not None
        return planned.tip
    known = planned.results.get(id(node))
    return packer.want(row_of[id(node)]) if known is None else known


class Descent:
    """A session's way down the tree in one step."""

    def __init__(self, session: Session, planned: Planned) -> None:
        assert planned.tip is not None  # a piece of prompt decides nothing
        self.session = session
        self.planned = planned
        self.verdict = Verdict(session.tree.base, offered=len(planned.results))
        self.moves: list[tuple[int, int]] = []  # slots (from, to) to copy
        self.rows: list[int] = []  # results visited
        self.error: Exception | None = None
        self.row = planned.tip
        self._node = session.tree.root
        self._path: list[int] = []

    def ask(self) -> Ask:
        return self._ask(self._node, self._path)

    def asks(self) -> Iterator[tuple[int, Ask]]:
        """What may be asked on any way, and about the window: rows of the results, and the question to each."""
        yield self.row, self.ask()
        for node in self.planned.candidates:
            yield self.planned.results[id(node)], self._ask(node, [step.token for step in node.path()])
        if self.planned.foresight is not None:
            yield from zip(self.planned.foreseen, self.session.asks_ahead(self.planned), strict=True)

    def take(self, token: int) -> bool:
        node, planned, verdict = self._node, self.planned, self.verdict
        position = node.position + 1
        for guessed in node.children.values():
            if guessed.origin != DRAFT and id(guessed) in planned.results:
                self.session.guesser.tested(guessed, guessed.token == token)
        child = node.children.get(token)
        if child is not None and id(child) not in planned.results:
            child = None  # not in this step
        self.rows.append(self.row)
        verdict.tokens.append(token)
        verdict.sources.append(self._source(node, child))
        if child is not None:
            verdict.accepted += 1
            self._path.append(token)
            written, own = planned.slots[id(child)], int(self.session.slots[position])
            if written != own:
                self.moves.append((written, own))
        verdict.finish = self.session.finish(token, position)
        if verdict.finish or child is None:
            return False
        self._node, self.row = child, planned.results[id(child)]
        return True

    def fail(self, error: Exception) -> None:
        self.error = error

    def _ask(self, node: Node, path: list[int]) -> Ask:
        """A sampled child is put to the test whether or not it is in this step: if it is accepted, what the draft has
        grown below it stays alive."""
        proposal = None if node.row is None else Proposal(next(iter(node.children), None), node.row)
        return Ask(self.session.request.chooser, node.position + 1, self.session.history, path, proposal)

    def _source(self, node: Node, child: Node | None) -> int:
        if child is not None:
            return child.origin
        if not self.verdict.offered:
            return PLAIN
        offered = any(id(other) in self.planned.results for other in node.children.values())
        return CORRECTION if offered else BONUS
