"""The lookahead windows of a step: which sessions have one, of what size, and what its rows cost."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.decoding.lookahead import Lookahead
from specdec.decoding.tree import Node
from verifier_service.backend.result import LOOKAHEAD
from verifier_service.costs.step_latency import StepLatency
from verifier_service.costs.token_budget import WindowCosts
from verifier_service.sessions.ngram import LookaheadRows
from verifier_service.sessions.session import VerifierSession
from verifier_service.sessions.window_gain import Cost
from verifier_service.speculation.eligibility import Eligibility


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
        if size is not None and size.most_rows > free:
            size = None
        window = session.open_window(size)
        windows.append(window)
        if window is not None and size is not None:
            if exploring:  # the step measures the cost of rows, not the gain of windows
                costs.explore()
                may_explore = False  # one experiment a step
            else:
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
    if eligibility.uses_local_model(session):  # beside a local draft or heads a window gains little
        return None
    sizes, ngrams = session.window_sizes, session.ngrams
    size = ngrams.gain.wanted(sizes, cost, ngrams.size)
    return sizes[0] if size is None and policy.forced and policy.only_windows else size
