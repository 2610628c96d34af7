"""The outcome of a whole step: the tokens and results of all sessions in it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, islice
from typing import TypeVar

import numpy as np

from specdec.decoding.contrastive import DraftQuery
from specdec.decoding.query import SamplingQuery
from specdec.decoding.step_logits import StepLogits
from specdec.engine.engine import Pass
from specdec.serving.target_logprobs import TargetLogprobs
from verifier_service.backend.result import PromptScores, VerifyResult
from verifier_service.sessions.running_session import RunningSession
from verifier_service.sessions.session import VerifierSession
from verifier_service.sessions.step_rows import ScheduledRows
from verifier_service.verification.tree_verification import NotFiniteError, Prompts, TreeVerification, verify_trees

PLACES_A_STEP = 8
"""Maximum positions per step with log-probabilities for drafts that learn: each takes a pass over the vocabulary."""

Item = TypeVar("Item")


def evenly(items: Sequence[Item], most: int) -> Sequence[Item]:
    """Return at most `most` of the items, evenly spaced, in order."""
    return items[:: -(-len(items) // most)] if len(items) > most else items


def verify_step(
    entries: Sequence[tuple[RunningSession, ScheduledRows]],
    computing: Pass,
    pass_begun: float,
    while_computing: Callable[[], None] = lambda: None,
    observe: Callable[[Sequence[TreeVerification], Prompts, StepLogits], None] = lambda *_: None,
) -> VerifiedStep:
    """Wait for the forward pass of a step, begun at the time `pass_begun`, and verify the trees of all sessions.
    Nothing is committed, and errors propagate. `while_computing` is called while an asynchronous engine computes.
    `observe` is called with the verifications, the prompt rows that stop short of a root, and the logits, which are
    dropped afterwards. The verifications include failed ones, but not undecided ones without a token."""
    pairs = [(e, TreeVerification(e.session, rows)) for e, rows in entries if rows.root_row is not None]
    verifications = [verification for _, verification in pairs]

    def queries() -> Mapping[int, SamplingQuery]:
        prepared = dict(chain.from_iterable([v.prepare_queries() for v in verifications]))
        while_computing()
        return prepared

    sessions = [entry.session for entry, _ in entries]
    before = [session.grammar_seconds for session in sessions]
    logits = computing.logits(queries)
    forward_seconds = time.monotonic() - pass_begun
    in_grammars = [(s, s.grammar_seconds - earlier) for s, earlier in zip(sessions, before, strict=True)]
    verify_trees(verifications, logits)
    verified = VerifiedStep(entries, pairs, logits, forward_seconds, in_grammars)
    observe([v for v in verifications if v.lacks is None or v.result.tokens], verified.prompts, logits)
    return verified


class VerifiedStep:
    """The verified trees of a step. `commit` commits the tokens and makes the `draft_queries` of sessions whose row was
    undecided (CONTRASTIVE)."""

    def __init__(
        self,
        entries: Sequence[tuple[RunningSession, ScheduledRows]],
        pairs: Sequence[tuple[RunningSession, TreeVerification]],
        logits: StepLogits,
        forward_seconds: float,
        in_grammars: Sequence[tuple[VerifierSession, float]],
    ) -> None:
        """Take the log-probabilities that sessions need from `logits`, which are not kept. `pairs`: the verifications
        of the step; `in_grammars`: seconds in each session's grammar during the pass."""
        self.forward_seconds = forward_seconds
        self._in_grammars = in_grammars
        failed = {entry: verification.error for entry, verification in pairs if verification.error is not None}
        scores = _prompt_scores(entries, logits)
        failed |= {e: NotFiniteError() for e, scored in scores if any(math.isnan(p.chosen) for p in scored.logprobs)}
        self.failed = list(failed.items())
        self.scores = [(entry, scored) for entry, scored in scores if entry not in failed]
        self._prefilled = [(e, rows) for e, rows in entries if rows.root_row is None and e not in failed]
        sound = [(entry, verification) for entry, verification in pairs if entry not in failed]
        self._undecided = [(entry, verification) for entry, verification in sound if verification.lacks is not None]
        self.draft_queries: list[tuple[RunningSession, DraftQuery]] = []
        self._sound = [(entry, verification) for entry, verification in sound if verification.result.tokens]
        # Slots (from, to) to copy: accepted candidates of side branches.
        self.kv_copies = [copy for _, verification in self._sound for copy in verification.kv_copies]
        self._add_requested(logits)
        self._add_overruled(logits)

    @property
    def prompts(self) -> Prompts:
        """The rows of prompts that stop short of a root; `failed` sessions have none."""
        return [(entry.session, rows) for entry, rows in self._prefilled]

    def _add_requested(self, logits: StepLogits) -> None:
        """Add the log-probabilities of committed tokens to the results of the requests that ask for them."""
        asking = [
            verification for _, verification in self._sound if verification.session.request.top_logprobs is not None
        ]
        if not asking:
            return
        rows = [row for verification in asking for row in verification.rows]
        tokens = np.asarray([token for verification in asking for token in verification.result.tokens])
        tops = [verification.session.request.top_logprobs or 0 for verification in asking for _ in verification.rows]
        found = iter(logits.logprobs(rows, tokens, tops))
        for verification in asking:
            verification.result.logprobs = list(islice(found, len(verification.rows)))

    def _add_overruled(self, logits: StepLogits) -> None:
        """Add the target's log-probabilities to the results, at up to PLACES_A_STEP positions where it overruled a
        remote draft that learns."""
        places = [(verification, place) for _, verification in self._sound for place in verification.overruled]
        if not places:
            return
        asking = evenly(places, PLACES_A_STEP)
        tokens = np.asarray([place.token for _, place in asking])
        tops = [verification.session.policy.overruled_logprobs for verification, _ in asking]
        found = logits.logprobs([place.row for _, place in asking], tokens, tops)
        for (verification, place), logprobs in zip(asking, found, strict=True):
            verification.result.overruled.append(TargetLogprobs.of(place.position, logprobs))

    def hide_grammar_seconds(self, seconds: float) -> None:
        """Subtract from the grammars' time what passed while an asynchronous engine computed: at most `seconds`, the
        time of its pass."""
        if beside := sum(taken for _, taken in self._in_grammars):
            for session, taken in self._in_grammars:
                session.grammar_seconds -= taken * min(1.0, seconds / beside)

    @property
    def results(self) -> list[tuple[RunningSession, VerifyResult]]:
        """The tokens to commit; `failed` sessions have none."""
        return [(entry, verification.result) for entry, verification in self._sound]

    def commit(self, now: float) -> list[tuple[RunningSession, VerifyResult]]:
        """Commit the chosen tokens and return the results; `failed` sessions get nothing."""
        for entry, rows in self._prefilled:
            entry.session.computed += rows.count
        for entry, scores in self.scores:
            entry.session.apply_scores(scores)
        results = [(entry, verification.commit_result(now)) for entry, verification in self._sound]
        for entry, verification in self._undecided:
            if not verification.result.tokens:
                entry.session.computed += verification.planned.count - 1  # the root's row is computed again
            assert verification.lacks is not None
            self.draft_queries.append((entry, entry.session.ask(verification.lacks)))
        for entry, _ in self._sound:  # not of unfinished prompts: their logits are still unchecked
            entry.session.cache_prefix()
        return results


def grammar_seconds(entries: Iterable[tuple[RunningSession, ScheduledRows]]) -> float:
    """Return the seconds that the sessions' grammars took since their last step."""
    return sum(entry.session.grammar_seconds for entry, _ in entries)


def _prompt_scores(
    entries: Sequence[tuple[RunningSession, ScheduledRows]], logits: StepLogits
) -> list[tuple[RunningSession, PromptScores]]:
    """Return the log-probabilities of the prompt tokens scored in this step, for the requests that ask for them."""
    asking = [(entry, rows.scored) for entry, rows in entries if rows.scored]
    if not asking:
        return []
    tokens, tops = list[int](), list[int]()
    for entry, scored in asking:
        request, first = entry.session.request, entry.session.scored
        tokens += request.prompt[first : first + len(scored)]
        tops += [request.prompt_logprobs or 0] * len(scored)
    found = iter(logits.logprobs([row for _, scored in asking for row in scored], np.asarray(tokens), tops))
    return [(e, PromptScores(e.session.scored, list(islice(found, len(scored))))) for e, scored in asking]
