"""The verification of a whole step: one forward pass, and the tokens it commits for every session."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, islice

import numpy as np

from specdec.decoding.query import SamplingQuery
from specdec.engine.batch import PackedBatch
from specdec.engine.engine import Step
from verifier_service.backend.result import VerifyResult
from verifier_service.sessions.running_session import RunningSession
from verifier_service.sessions.step_rows import ScheduledRows
from verifier_service.verification.tree_verification import TreeVerification
from verifier_service.verification.verify_trees import verify_trees


class VerifiedStep:
    """A forward pass over the rows of a step, and its verified trees. The constructor commits nothing and raises any
    error; `apply` commits. An engine that computes asynchronously calls `beside` meanwhile."""

    def __init__(
        self,
        entries: Sequence[tuple[RunningSession, ScheduledRows]],
        pack: Callable[[], PackedBatch],
        forward: Step,
        beside: Callable[[], None] = lambda: None,
    ) -> None:
        start = time.monotonic()
        pairs = [(e, TreeVerification(e.session, rows)) for e, rows in entries if rows.root_row is not None]
        self.verifications = [verification for _, verification in pairs]

        def asked() -> Mapping[int, SamplingQuery]:
            queries = dict(chain.from_iterable([v.queries() for v in self.verifications]))
            beside()
            return queries

        self.logits = forward(pack(), asked)
        self.forward_seconds = time.monotonic() - start
        verify_trees(self.verifications, self.logits)
        self._prefilled = [(entry, rows.count) for entry, rows in entries if rows.root_row is None]
        self._sound = [(entry, verification) for entry, verification in pairs if verification.error is None]
        self.failed = [(entry, verification.error) for entry, verification in pairs if verification.error is not None]
        # Slots (from, to) to copy: accepted candidates of side branches.
        self.kv_copies = [copy for _, verification in self._sound for copy in verification.kv_copies]
        self._add_logprobs()

    def _add_logprobs(self) -> None:
        """Add the log-probabilities of committed tokens to the results of requests for them."""
        asking = [
            verification for _, verification in self._sound if verification.session.request.top_logprobs is not None
        ]
        if not asking:
            return
        rows = [row for verification in asking for row in verification.rows]
        tokens = np.asarray([token for verification in asking for token in verification.result.tokens])
        tops = [verification.session.request.top_logprobs or 0 for verification in asking for _ in verification.rows]
        found = iter(self.logits.logprobs(rows, tokens, tops))
        for verification in asking:
            verification.result.logprobs = list(islice(found, len(verification.rows)))

    def apply(self, now: float) -> list[tuple[RunningSession, VerifyResult]]:
        """Commit and return accepted tokens; `failed` sessions get nothing."""
        for entry, count in self._prefilled:
            entry.session.computed += count
        results = [(entry, verification.apply(now)) for entry, verification in self._sound]
        for entry, _ in self._sound:  # not of unfinished prompts: their logits are still unchecked
            entry.session.cache_prefix()
        return results
