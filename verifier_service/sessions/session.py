"""A session at the verifier: its text, its memory, its candidates, and its part in a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from specdec.decoding import contrastive
from specdec.decoding.contrastive import DraftQuery
from specdec.decoding.lookahead import Lookahead
from specdec.decoding.ngrams import Tokens
from specdec.decoding.query import PenaltyState, TokenMask
from specdec.decoding.sampling import Rule
from specdec.decoding.tree import NO_NODES, BestNodes, Node, Paths, TokenTree
from specdec.engine.batch import Packer
from specdec.engine.kv.blocks import BLOCK, BlockPool, BlockTable
from specdec.engine.kv.slots import Slots
from specdec.grammar.text_grammar import TextGrammar
from specdec.serving import checksum
from verifier_service.backend.request import Policy, VerifierSessionRequest
from verifier_service.backend.result import (
    CONTEXT,
    CORRECTION,
    LENGTH,
    REMOTE_DRAFT,
    STOP,
    PromptScores,
    VerifyResult,
)
from verifier_service.sessions.draft_timing import DraftGain, DraftTiming, WaitEstimate
from verifier_service.sessions.ngram import MAX_OWN_NODES, LookaheadRows, SessionNgrams
from verifier_service.sessions.step_rows import ScheduledRows, plan_tree
from verifier_service.sessions.window_gain import TenantWindows, WindowGain
from verifier_service.settings.tuning import DEFAULTS, Tuning


class VerifierSession:
    """A session at the verifier, owned by the step loop's thread.

    `computed` is the length of the committed text's prefix in the KV cache. A session is decoding once everything
    except the root is computed; until then it is in prefill. Without memory, `computed` is 0 and the session waits.
    """

    def __init__(
        self,
        request: VerifierSessionRequest,
        policy: Policy,
        max_nodes: int,
        vocabulary: int,
        tuning: Tuning = DEFAULTS,
        *,
        chains_only: bool = False,
        block_verification: bool = True,
        draft_gain: DraftGain | None = None,
        tenant_windows: TenantWindows | None = None,
    ) -> None:
        sampler = request.sampler
        self.block_verification = block_verification and sampler.rule is Rule.REJECTION and not sampler.sampling.greedy
        """True if chains of draws may be verified as blocks; `verifies_blocks` decides for the current chain."""
        self._compared = 0  # position of the last candidate compared with candidates of other texts
        self.chains_only = chains_only
        """True if the engine verifies a single chain of candidates instead of a tree."""
        self.request = request
        self.policy = policy
        self.vocabulary = vocabulary
        text = request.prompt + request.generated
        self.grammar = None if request.grammar is None else request.grammar.begin(request.generated, request.end_tokens)
        self.end = min(len(request.prompt) + request.max_tokens, request.context)
        self.tree = TokenTree(
            text,
            vocabulary=vocabulary,
            last_position=self.end - 1,
            end_tokens=request.end_tokens,
            max_nodes=max_nodes + MAX_OWN_NODES,
            sampled=request.sampler.rule is Rule.REJECTION,
            permits=None if self.grammar is None else self._permits,
        )
        self.penalty_state = (
            PenaltyState(vocabulary, request.prompt, request.generated) if request.sampler.sampling.penalises else None
        )
        self.draft_timing = DraftTiming(tuning.draft_timing)
        self.draft_gain = draft_gain or DraftGain(tuning=tuning.draft_gain)
        self._windows = tuning.windows
        window_gain = WindowGain(tenant_windows, tuning.windows)
        pool = None if tenant_windows is None or request.cache_salt else tenant_windows.pool
        self.ngrams = SessionNgrams(text, self.end, request.sampler, tuning.ngrams, window_gain, pool)
        self._checksum = request.checksum
        self.table: BlockTable | None = None
        self.computed = 0
        self.cached_tokens = 0  # tokens in the KV cache at first admission; 0 once sent
        self.consumed = len(text)  # tokens read by the client, prompt included
        self.scored = max(1, request.scored_tokens)  # leading prompt tokens that need no further logprobs
        self.scores_read = self.scored  # of these, tokens whose logprobs the client has read
        self.refused_extends = 0  # invalid messages of candidates
        self._query: DraftQuery | None = None  # about the root's row (CONTRASTIVE)
        self._best_nodes: BestNodes | None = None  # of the current tree; None: to be computed
        self.grammar_seconds = 0.0  # spent in its grammar by the step loop's thread since its last step

    @property
    def remaining_prompt(self) -> int:
        """The number of uncomputed committed tokens before the root."""
        return self.tree.base - 1 - self.computed

    @property
    def scores_prompt(self) -> bool:
        """True while tokens of the prompt still need log-probabilities."""
        return self.request.prompt_logprobs is not None and self.scored < len(self.request.prompt)

    @property
    def generated(self) -> int:
        """The number of generated tokens, including those before a resumption."""
        return self.tree.base - len(self.request.prompt)

    @property
    def needs_draft(self) -> bool:
        """True if no token can be chosen without the draft's distribution at its place (CONTRASTIVE)."""
        return self.request.sampler.rule is Rule.CONTRASTIVE

    @property
    def samples_candidates(self) -> bool:
        """True if candidates are drawn (REJECTION)."""
        return self.request.sampler.rule is Rule.REJECTION

    @property
    def speculates(self) -> bool:
        """True if the policy and the rule permit any candidates."""
        return self.policy.remote or self.takes_own_candidates

    @property
    def computable(self) -> int:
        """The number of uncomputed committed tokens that a step can compute. Under CONTRASTIVE, the root is excluded
        until the draft's distribution for the next token has arrived."""
        return self.remaining_prompt + (not self.needs_draft or self.tree.root.distribution is not None)

    @property
    def awaits_draft(self) -> bool:
        """True if the session has memory, but nothing for a step to compute until its draft sends a distribution.
        Thread-safe."""
        return self.table is not None and not self.computable

    @property
    def slots(self) -> Slots:
        assert self.table is not None  # only sessions with memory take part in steps
        return self.table.slots

    @property
    def exclusive_blocks(self) -> int:
        """Blocks of memory that no other text shares."""
        assert self.table is not None
        return self.table.exclusive

    # --- memory -------------------------------------------------------------------------------------

    def allocate(self, pool: BlockPool, make_room: Callable[[int], None] = lambda _: None) -> tuple[Slots, Slots]:
        """Allocate memory for the text; PoolFullError, with nothing allocated, if there is too little.

        While tokens of the prompt need log-probabilities, the prefix cache is used only up to the first row whose
        logits give them. `make_room` is called with the number of missing blocks, after the blocks found in the prefix
        cache are taken; it may raise PoolFullError too. Return the slots (from, to) to copy before the next step.
        """
        known = self.tree.committed
        self.table, source, target = pool.open(
            known[: self.scored] if self.scores_prompt else known, self.request.cache_scope
        )
        try:
            make_room(max(0, -(-(self.tree.base - len(self.table.slots)) // BLOCK)))
            self.table.reserve(self.tree.base)
        except Exception:
            self.free()
            raise
        self.computed = self.table.shared
        return source, target

    def free(self, *, wipe: bool = False) -> Slots:
        """Free the memory; the text stays and can be recomputed. Return the slots to overwrite if wiping."""
        if self.table is None:
            return np.arange(0)
        spare = self.table.close(wipe=wipe)
        self.table, self.computed = None, 0
        return spare

    def cache_prefix(self) -> None:
        """Publish the computed part of the text, so that other sessions can use its blocks."""
        if self.table is not None:
            self.table.publish(self.tree.committed, self.computed)

    # --- candidates ---------------------------------------------------------------------------------

    def extend(self, base: int, paths: Paths, arrived: float, base_age: float = 0.0) -> None:
        """Insert candidates of a draft, received at the time `arrived`; ValueError if they are invalid. `base_age`:
        seconds that the draft had known the text up to `base` when it sent them; 0: unknown."""
        rule = self.request.sampler.rule
        rows = [(parent, row) for parent, row in paths.distributions if row.fits(rule, self.vocabulary)]
        self._best_nodes = None  # first, since a message with an error may be inserted in part
        self.tree.insert(base, paths._replace(distributions=rows), origin=REMOTE_DRAFT, drafted=True)
        row = self.tree.root.distribution
        if self._query is not None and row is not None and not contrastive.answers(row, self._query.ids):
            self.tree.root.distribution = None  # sent before the draft had the query
        self.draft_timing.arrived(base, arrived, base_age)

    def ask(self, plausible: NDArray[np.int64]) -> DraftQuery:
        """Return the query to the draft after an undecided row: the draft's distribution at the root lacks some of the
        `plausible` tokens. Until the answer arrives, the session waits as for a first distribution (CONTRASTIVE)."""
        root, before = self.tree.root, None if self._query is None else self._query.ids
        assert root.distribution is not None
        ids = contrastive.ids_to_query(plausible, before, root.distribution.size)
        self._query, root.distribution = DraftQuery(self.tree.base, ids), None
        self._best_nodes = None
        return self._query

    @contextmanager
    def _asking(self) -> Iterator[TextGrammar]:
        """Yield the grammar and time its use: the mask of a costly grammar can take longer than a step."""
        assert self.grammar is not None
        begin = time.perf_counter()
        try:
            yield self.grammar
        finally:
            self.grammar_seconds += time.perf_counter() - begin

    def _permits(self, parent: Node, token: int) -> bool:
        with self._asking() as grammar:
            return grammar.permits([node.token for node in parent.path()], token)

    def allowed(self, path: Sequence[int]) -> TokenMask | None:
        """Return the tokens permitted by the grammar after the committed text and a path; None without a grammar, or if
        it excludes the path itself. GrammarError if the grammar is too complex."""
        if self.grammar is None:
            return None
        with self._asking() as grammar:
            return grammar.allowed(path)

    def hint(self, path: Sequence[int]) -> TokenMask | None:
        """Return the mask of `allowed`, or None if the grammar cannot give it."""
        if self.grammar is None:
            return None
        with self._asking() as grammar:
            return grammar.hint(path)

    def forced(self) -> list[int]:
        """Return the next tokens, as far as the grammar forces them."""
        if self.grammar is None:
            return []
        with self._asking() as grammar:
            return grammar.forced()

    def usable(self, node: Node) -> bool:
        """True if a candidate lies within the policy's depth and, under CONTRASTIVE, has the draft's distribution,
        without which nothing can be chosen below it."""
        most = self.policy.max_depth
        if most and node.position >= self.tree.base + most:
            return False
        return not self.needs_draft or node.distribution is not None

    def client_has_read(self, tokens: int, scored: int) -> None:
        """Record that the client has read `tokens` generated tokens, and the log-probabilities of the prompt's first
        `scored` tokens."""
        self.consumed = min(self.tree.base, len(self.request.prompt) + tokens)
        self.scores_read = max(self.scores_read, min(self.scored, scored))

    @property
    def unread(self) -> int:
        """The number of tokens, generated or of the prompt, whose results the client has not read."""
        return self.tree.base - self.consumed + self.scored - self.scores_read

    def set_policy(self, policy: Policy) -> None:
        """Take a new policy: the best nodes are chosen again."""
        self.policy = policy
        self._best_nodes = None

    @property
    def takes_own_candidates(self) -> bool:
        """True if the session may have candidates of proposers. Under REJECTION with a remote draft they would displace
        better ones; under CONTRASTIVE nothing can be chosen below them."""
        rule = self.request.sampler.rule
        chosen = rule in (Rule.COUPLED, Rule.TYPICAL)
        return self.policy.own and (chosen or (rule is Rule.REJECTION and not self.policy.remote))

    def propose_ngrams(self, break_even: float, shared: Tokens | None) -> None:
        """Add n-gram proposals to the tree, at most once for each length of the text; `shared`: finished texts of the
        tenant."""
        every = self.policy.lookahead is not None
        if self.ngrams.propose(
            self.tree,
            break_even,
            shared,
            every=every,
            sampled=self.samples_candidates,
            lookups=self.policy.ngram,
            windows=self.policy.windows,
        ):
            self._best_nodes = None

    def add_candidates(self, paths: Paths, source: int) -> None:
        """Add a proposer's candidates below the text, with `source` as the source of resulting tokens. If candidates
        are sampled (REJECTION), a candidate without the distribution it was drawn from is dropped."""
        self.tree.insert(self.tree.base, paths, origin=source)
        self._best_nodes = None

    @property
    def window_sizes(self) -> tuple[Lookahead, ...]:
        """The window sizes to choose from if the request names none, in ascending order."""
        return self._windows.jacobi_sizes if self.policy.jacobi else self._windows.sizes

    def open_window(self, size: Lookahead | None) -> LookaheadRows | None:
        """Open a lookahead window of this size for the coming step and return its rows, if any. If `size` is None,
        close the window."""
        if size is None:
            self.ngrams.close_window()
            return None
        return self.ngrams.open_window(self.tree, size)

    @property
    def has_draft_candidates(self) -> bool:
        """True if a remote draft's candidates for the next token have arrived; proposers' candidates do not count."""
        return any(node.drafted for node in self.tree.root.children.values())

    @property
    def best_nodes(self) -> BestNodes:
        """The best candidates, up to the policy's limit."""
        if self._best_nodes is None:
            usable = self.usable if self.needs_draft or self.policy.max_depth else None
            ranked = (self.tree.best_chain if self.chains_only else self.tree.by_path_logprob)(usable)
            self._best_nodes = BestNodes.of(ranked, self.policy.max_candidates)
        return self._best_nodes

    def candidates(self) -> BestNodes:
        """Return the candidates to choose from for the coming step."""
        return self.best_nodes if self.speculates and not self.remaining_prompt else NO_NODES

    def compare_candidates(self) -> BestNodes:
        """Return `candidates`, and mark them as compared with other texts' candidates."""
        best = self.candidates()
        self._compared = max([self._compared, *(node.position for node in best.nodes)])
        return best

    @property
    def verifies_blocks(self) -> bool:
        """True if the chain below the text may be verified as a block. A chain with a compared draw may not: the draw
        influenced where a step ended."""
        return self.block_verification and self.tree.base > self._compared

    def wait_estimate(self, now: float, break_even: float, *, drafted: bool) -> WaitEstimate:
        """Return the session's wait estimate. `drafted`: whether it uses a remote draft. Without one, it gains nothing
        by waiting, and its own candidates are delayed; nor does it before its last token, which the step itself
        brings, unless the rule needs the draft's distribution."""
        best = self.candidates()
        at_last = self.tree.base + 1 >= self.end and not self.needs_draft
        if not drafted or self.policy.patience <= 0 or at_last:
            return WaitEstimate(best.expected)
        return self.draft_timing.wait_estimate(
            self.tree.base,
            now,
            expected=best.expected,
            leaf=best.leaf,
            break_even=break_even,
            patience=self.policy.patience,
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
        """Add rows to a batch: the next `count` uncomputed committed tokens and, if the root is among them, a window
        and the candidates that have a slot at their position. `nodes`: the candidates, best first; `tree_slots`: free
        slots for side branches, popped from the end."""
        start, end = self.computed, self.computed + count
        own = self.slots
        nodes = [node for node in nodes if node.position < len(own)]
        rows = packer.add_rows(self.tree.committed[start:end], start, own[start:end])
        planned = ScheduledRows(count, first_row=rows.start)
        if end == self.tree.base:
            planned.root_row = packer.want(rows[-1])
        if self.scores_prompt:
            scored = rows[self.scored - 1 - start : len(self.request.prompt) - 1 - start]
            planned.scored = [packer.want(row) for row in scored]
        if planned.root_row is not None and (nodes or lookahead):
            planned.tree = plan_tree(
                packer, self.tree.root, planned.root_row, own, list(rows), nodes, tree_slots, lookahead
            )
        else:
            packer.add_path(own[:end], rows)
        return planned

    def apply_scores(self, scores: PromptScores) -> None:
        """Record that a step has scored these tokens of the prompt."""
        self.scored = scores.first + len(scores.logprobs)

    def apply_result(self, result: VerifyResult, computed: int, now: float) -> None:
        """Commit a step's tokens, and update the session's state and statistics. The step computed `computed` committed
        tokens, besides the accepted candidates."""
        self.computed += computed + result.accepted
        self.draft_timing.verified(result.accepted, CORRECTION in result.sources)
        self.tree.commit(result.tokens)
        self._query = None
        self.draft_timing.committed(self.tree.base, now)
        self.ngrams.extend(result.tokens, result.sources)
        self._best_nodes = None
        if self.penalty_state is not None:
            self.penalty_state.extend(result.tokens)
        if self.grammar is not None:
            with self._asking() as grammar:
                grammar.commit(result.tokens)
        self._checksum = result.checksum = checksum.extended(self._checksum, result.tokens, result.finish)

    def finish_reason(self, token: int, position: int) -> int:
        """Return the FinishReason if the text ends with this token; 0 if it continues."""
        if token in self.request.end_tokens:
            return STOP
        if position + 1 >= self.end:
            return LENGTH if self.end == len(self.request.prompt) + self.request.max_tokens else CONTEXT
        return 0
