"""Proposers without a model: n-gram lookup in the text, and lookahead windows in the step's batch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from specdec.decoding.lookahead import Lookahead
from specdec.decoding.step_logits import StepLogits
from specdec.decoding.tree import Node
from verifier_service.backend.result import LOOKAHEAD
from verifier_service.costs.step_latency import StepLatency
from verifier_service.costs.token_budget import WindowCosts
from verifier_service.proposers.proposer import NO_PROPOSALS, ComingStep, ProposalStats, Proposer
from verifier_service.proposers.suffix_cache import SuffixCache
from verifier_service.sessions.ngram import LookaheadRows
from verifier_service.sessions.session import VerifierSession
from verifier_service.sessions.window_gain import Cost
from verifier_service.speculation.eligibility import Eligibility
from verifier_service.verification.tree_verification import TreeVerification


class LookupProposer(Proposer):
    """N-gram lookup for all sessions. A session keeps its own text (`ngram.py`); this object keeps `cached_tokens`
    tokens of each tenant's finished texts, except texts with a cache salt."""

    def __init__(self, cached_tokens: int) -> None:
        self._cache = SuffixCache(cached_tokens)

    def propose(self, step: ComingStep) -> ProposalStats:
        for session in step.proposed_for():
            salted = session.request.cache_salt
            session.propose_ngrams(step.break_even, None if salted else self._cache.tokens_of(session.request.tenant))
        return NO_PROPOSALS

    def observe(self, verifications: Sequence[TreeVerification], logits: StepLogits) -> None:
        """Update the windows of a step with the target's choices after their rows."""
        with_window = [
            verification
            for verification in verifications
            if verification.error is None and verification.lookahead_count
        ]
        if not with_window:
            return
        rows, queries = zip(
            *(pair for verification in with_window for pair in verification.lookahead_queries()), strict=True
        )
        chosen = iter(logits.choose(rows, queries)[0].tolist())
        for verification in with_window:
            verification.session.ngrams.observe_window(
                list(itertools.islice(chosen, verification.lookahead_count)), len(verification.result.tokens)
            )

    def finished(self, session: VerifierSession) -> None:
        if not session.request.cache_salt:
            self._cache.add(session.request.tenant, session.tree.committed)


def open_windows(
    sessions: Sequence[VerifierSession],
    chosen: Sequence[list[Node]],
    decoding: int,
    free: int,
    latency: StepLatency,
    eligibility: Eligibility,
    *,
    may_explore: bool = False,
) -> list[LookaheadRows | None]:
    """Open the lookahead windows of a step with `decoding` sessions. Return one entry per session of `sessions`.

    `chosen`: each session's candidates, to which those of Jacobi windows are appended in place; `free`: tree slots left
    for windows. If the step `may_explore`, a window may be opened to learn the cost of its rows.
    """
    costs = WindowCosts(decoding, latency, decoding + sum(map(len, chosen)))
    windows: list[LookaheadRows | None] = []
    for session, nodes in zip(sessions, chosen, strict=True):
        size = _wanted(session, costs.of, eligibility)
        exploring = size is None and may_explore and latency.may_explore
        if exploring:
            size = _wanted(session, costs.optimistic, eligibility)
            if size is not None:  # one experiment a step
                costs.explore()
                may_explore = False
        if size is not None and size.most_rows > free:
            size = None
        window = session.open_window(size)
        windows.append(window)
        if window is not None and size is not None:
            if not exploring:  # an exploring step measures the cost of rows, not the gain of windows
                _charge(session, size, costs, window, nodes)
            planned = {id(node) for node in nodes}
            further = [node for node in window.candidates if id(node) not in planned and session.usable(node)]
            nodes += further[: max(0, session.policy.max_candidates - len(nodes))]
            costs.add(len(window.nodes))
            free -= len(window.nodes)
    return windows


def _charge(
    session: VerifierSession, size: Lookahead, costs: WindowCosts, window: LookaheadRows, nodes: Sequence[Node]
) -> None:
    """Record the costs of a window and of candidates from windows, unless the request asks for windows at any cost."""
    if session.policy.lookahead is None and not session.policy.forced:
        gain = session.ngrams.gain
        gain.begin(size, session.window_sizes, costs.of)
        found = sum(node.origin == LOOKAHEAD for node in nodes)
        gain.charge(size, costs.of_rows(len(window.nodes)), costs.of_rows(found))


def window_rows(
    sessions: Sequence[VerifierSession],
    chosen: Sequence[list[Node]],
    decoding: int,
    free: int,
    latency: StepLatency,
    eligibility: Eligibility,
) -> int:
    """Return an estimate of the rows that `open_windows` would add, counting each window at its largest size."""
    costs = WindowCosts(decoding, latency, decoding + sum(map(len, chosen)))
    rows = 0
    for session in sessions:
        size = _wanted(session, costs.of, eligibility)
        if size is not None and size.most_rows <= free - rows:
            rows += size.most_rows
            costs.add(size.most_rows)
    return rows


def _wanted(session: VerifierSession, cost: Cost, eligibility: Eligibility) -> Lookahead | None:
    """Return the size of a session's window; None: no window. A forced session that may use only windows always has
    one."""
    policy = session.policy
    if not policy.windows or session.chains_only or not eligibility.uses_proposers(session):
        return None
    if policy.lookahead is not None:
        return policy.lookahead
    if eligibility.uses_local_model(session):  # beside a local draft a window gains little
        return None
    sizes, ngrams = session.window_sizes, session.ngrams
    size = ngrams.gain.wanted(sizes, cost, ngrams.size)
    return sizes[0] if size is None and policy.forced and policy.only_windows else size
