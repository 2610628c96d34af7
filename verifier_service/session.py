"""One session at the verifier: its text, its memory, and one step of its verification."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from specdec.decoding.choice import RequestSampler
from specdec.decoding.lookahead import Lookahead
from specdec.decoding.processing import PenaltyState
from specdec.decoding.sampling import Rule
from specdec.decoding.speculation import OWN_DRAFTERS, Drafter
from specdec.decoding.suffix import Tokens
from specdec.decoding.tree import Node, Paths, TokenTree
from specdec.engine.batch import Packer
from specdec.engine.kv.blocks import BLOCK, BlockPool, BlockTable
from specdec.engine.kv.slots import PoolFullError, Slots
from specdec.serving import checksum
from verifier_service.proposers.ngram import MAX_OWN_NODES, LookaheadRows, NgramProposer
from verifier_service.scheduling.batch_plan import ScheduledRows, plan_tree
from verifier_service.scheduling.step_delay import DraftTiming, WaitEstimate
from verifier_service.verification.result import CONTEXT, CORRECTION, DRAFT, LENGTH, OWN_DRAFT, STOP, VerifyResult

if TYPE_CHECKING:
    from verifier_service.verification.tree_verification import TreeVerification


@dataclass(frozen=True)
class SessionRequest:
    """A validated VerifyOpen."""

    prompt: list[int]
    generated: list[int]
    sampler: RequestSampler
    end_tokens: frozenset[int]
    max_tokens: int
    top_logprobs: int | None  # log-probabilities wanted for a token besides its own; None: not even that
    context: int
    tenant: str = ""
    checksum: int = 0  # of the VerifyOpen
    coalesce_commits: bool = False  # nobody reads along


@dataclass
class Policy:
    """A validated VerifyPolicy."""

    drafters: frozenset[Drafter]  # who may propose candidates
    max_candidates: int  # in a step
    patience: float  # seconds that a step may be put off for a draft's candidates
    forced: bool = False  # whether or not speculation pays
    lookahead: Lookahead | None = None  # the window that is wanted in every step; None: one that pays

    def __post_init__(self) -> None:
        # Asked for several times a step.
        self.remote = Drafter.REMOTE in self.drafters
        self.own = bool(self.drafters & OWN_DRAFTERS)
        self.ngram = Drafter.NGRAM in self.drafters
        self.windows = Drafter.LOOKAHEAD in self.drafters
        self.local_model = Drafter.LOCAL_MODEL in self.drafters


class Session:
    """Owned by the step loop's thread.

    `computed` counts the leading tokens of the committed text whose keys and values are in place; a session
    with all but the tip computed is decoding, one with fewer is in its prompt. One without memory has nothing
    computed and waits.
    """

    def __init__(self, request: SessionRequest, policy: Policy, max_nodes: int, vocabulary: int) -> None:
        self.request = request
        self.policy = policy
        self.vocabulary = vocabulary
        text = request.prompt + request.generated
        self.end = min(len(request.prompt) + request.max_tokens, request.context)
        self.tree = TokenTree(
            text,
            vocabulary=vocabulary,
            last_position=self.end - 1,
            end_tokens=request.end_tokens,
            max_nodes=max_nodes + MAX_OWN_NODES,
            sampled=request.sampler.rule is Rule.REJECTION,
        )
        self.penalty_state = (
            PenaltyState(vocabulary, request.prompt, request.generated) if request.sampler.sampling.penalises else None
        )
        self.draft_timing = DraftTiming()
        self.ngrams = NgramProposer(text, self.end, request.sampler)
        self._checksum = request.checksum
        self.table: BlockTable | None = None
        self.computed = 0
        self.cached_tokens = 0  # tokens that were in memory already when it was first given some
        self.consumed = len(text)
        self.refused_extends = 0  # messages of candidates that made no sense
        self._expected_tokens: tuple[float, float] | None = None  # of the tree as it is

    @property
    def remaining_prompt(self) -> int:
        """Committed tokens before the tip that are not computed yet."""
        return self.tree.base - 1 - self.computed

    @property
    def needs_draft(self) -> bool:
        """Whether no token can be chosen without the draft's distribution at its place."""
        return self.request.sampler.rule is Rule.CONTRASTIVE

    @property
    def samples_candidates(self) -> bool:
        """Whether a place has room for one candidate, which is drawn."""
        return self.request.sampler.rule is Rule.REJECTION

    @property
    def speculates(self) -> bool:
        """Whether it may have candidates at all."""
        return self.policy.remote or self.takes_own_candidates

    @property
    def computable(self) -> int:
        """Committed tokens that a step can take: all but, while its draft is silent, the tip of a session that
        contrasts."""
        return self.remaining_prompt + (not self.needs_draft or self.tree.root.distribution is not None)

    @property
    def slots(self) -> Slots:
        assert self.table is not None  # a session without memory is in no step
        return self.table.slots

    # --- memory -------------------------------------------------------------------------------------

    def allocate(self, pool: BlockPool, spare: int = 0) -> tuple[Slots, Slots]:
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

    def free(self, *, wipe: bool = False) -> Slots:
        """Give the memory back; the text stays, and can be computed anew. Slots to overwrite if wiping."""
        if self.table is None:
            return np.arange(0)
        spare = self.table.close(wipe=wipe)
        self.table, self.computed = None, 0
        return spare

    def cache_prefix(self) -> None:
        """Let others share what has been computed."""
        if self.table is not None:
            self.table.publish(self.tree.committed, self.computed)

    # --- candidates ---------------------------------------------------------------------------------

    def extend(self, base: int, paths: Paths, arrived: float, held: float = 0.0) -> None:
        """Candidates came, from a draft that had known of `base` for so many seconds, if it says so; ValueError if they
        cannot be."""
        rule = self.request.sampler.rule
        rows = [(parent, row) for parent, row in paths.distributions if row.fits(rule, self.vocabulary)]
        self.tree.insert(base, paths._replace(distributions=rows), origin=DRAFT)
        self.draft_timing.arrived(base, arrived, held)
        self._expected_tokens = None

    def usable(self, node: Node) -> bool:
        """Whether verifying a candidate can bring anything: where tokens are contrasted, one without the draft's
        distribution below it is a place at which nothing can be chosen."""
        return not self.needs_draft or node.distribution is not None

    def set_policy(self, policy: Policy) -> None:
        """Speculate otherwise from now on."""
        self.policy = policy
        self._expected_tokens = None

    @property
    def takes_own_candidates(self) -> bool:
        """Whether it may have candidates that come of no draft. Where they are drawn they would take the place of
        better ones; where tokens are contrasted nothing can be chosen below them."""
        rule = self.request.sampler.rule
        return self.policy.own and (rule is Rule.COUPLED or (rule is Rule.REJECTION and not self.policy.remote))

    def propose_ngrams(self, price: float, shared: Tokens | None) -> None:
        """Put its own candidates into the tree, once for each length of the text; `shared` are texts of others."""
        every = self.policy.lookahead is not None
        if self.ngrams.propose(
            self.tree,
            price,
            shared,
            every=every,
            sampled=self.samples_candidates,
            lookups=self.policy.ngram,
            windows=self.policy.windows,
        ):
            self._expected_tokens = None

    def add_local_candidates(self, paths: Paths) -> None:
        """Candidates of the verifier's own draft, below the text as it is."""
        self.tree.insert(self.tree.base, paths, origin=OWN_DRAFT)
        self._expected_tokens = None

    def open_window(self, size: Lookahead | None) -> LookaheadRows | None:
        """A lookahead window of this size for the coming step, if any."""
        if size is None or (size.ngram == 2 and self.samples_candidates):
            self.ngrams.close_window()  # a window's first level that is not sampled cannot be accepted
            return None
        return self.ngrams.open_window(self.tree, size)

    @property
    def has_draft_candidates(self) -> bool:
        """Whether a draft's candidates for the next token are here; what the session guessed itself does not count."""
        return any(node.origin == DRAFT for node in self.tree.root.children.values())

    @property
    def max_candidates(self) -> int:
        """Candidates it may have in a step."""
        if self.remaining_prompt or not self.speculates:
            return 0
        return self.policy.max_candidates

    def candidates(self) -> Iterator[tuple[float, Node]]:
        """The candidates it would like to have in a step, best first, each with its reach."""
        return islice(self.tree.by_path_logprob(self.usable), self.max_candidates)

    def expected_tokens(self) -> tuple[float, float]:
        """As `TokenTree.expected_tokens`, of as many candidates as it may have."""
        if self._expected_tokens is None:
            self._expected_tokens = self.tree.expected_tokens(self.policy.max_candidates, self.usable)
        return self._expected_tokens

    def wait_estimate(self, now: float, price: float) -> WaitEstimate:
        """What it would bring to a step now, and what it has to hope for, a row more costing `price` tokens."""
        expected, leaf = self.expected_tokens()
        if self.policy.patience <= 0:
            return WaitEstimate(expected)
        return self.draft_timing.wait_estimate(
            self.tree.base, now, expected=expected, leaf=leaf, price=price, patience=self.policy.patience
        )

    # --- a step -------------------------------------------------------------------------------------

    def plan(
        self,
        packer: Packer,
        count: int,
        nodes: list[Node],
        tree_slots: list[int],
        lookahead: LookaheadRows | None = None,
    ) -> ScheduledRows:
        """Add rows to a batch: `count` committed tokens that are not computed yet and, if the tip is the last of them,
        candidates, best first, as far as there is room to accept them, and a window. `tree_slots` holds free slots for
        side branches; its end is used up."""
        start, end = self.computed, self.computed + count
        own = self.slots
        nodes = [node for node in nodes if node.position < len(own)]
        rows = packer.add_rows(self.tree.committed[start:end], start, own[start:end])
        planned = ScheduledRows(count)
        if end == self.tree.base:
            planned.root_row = packer.want(rows[-1])
        if planned.root_row is not None and (nodes or lookahead):
            planned.tree = plan_tree(
                packer, self.tree.root, planned.root_row, own, list(rows), nodes, tree_slots, lookahead
            )
        else:
            packer.add_path(own[:end], rows)
        return planned

    def apply(self, verification: TreeVerification, now: float) -> VerifyResult:
        """Take what the walk has found into the text."""
        result = verification.result
        self.computed += verification.planned.count + result.accepted
        self.draft_timing.verified(result.accepted, CORRECTION in result.sources)
        self.tree.commit(result.tokens)
        self.draft_timing.committed(self.tree.base, now)
        self.ngrams.extend(result.tokens, result.sources)
        self._expected_tokens = None
        if self.penalty_state is not None:
            self.penalty_state.extend(result.tokens)
        self._checksum = result.checksum = checksum.extended(self._checksum, result.tokens, result.finish)
        return result

    def finish(self, token: int, position: int) -> int:
        """Whether the text ends with this token, and why."""
        if token in self.request.end_tokens:
            return STOP
        if position + 1 >= self.end:
            return LENGTH if self.end == len(self.request.prompt) + self.request.max_tokens else CONTEXT
        return 0
