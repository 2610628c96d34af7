"""What a draft is told of each commit: the new tokens, and what is worth guessing now."""

from __future__ import annotations

from collections.abc import Iterator

from specdec.v2 import draft_pb2, model_pb2, verifier_pb2

PRICE_SHARE = 0.03
"""What will be worth verifying a step later lies below what is verified now: it is grown from this part of the price
on, or from the draft's own least reach, if that is more. (A whole price left nothing to grow ahead; 0.3 of it was too
much still, and 0.1 brought eight sessions of a pod 8 % less, by `python -m bench.simulate`.)"""

FIRST_MIN_PROBABILITY = 0.1
"""Until the first verdict a draft grows what a first step can use, from this reach on at least: nobody waits for more,
and on shared cores a forest below every prompt of a crowd would hold up the prompts."""

PAUSED_COMMIT_TOKENS = 64
"""Tokens of which a draft that rests is told together, so that it has little to read when it is wanted again."""

EXTENDS_A_STEP = 4
"""Messages of candidates that a verifier's step is worth, where it can take so many: the fresher they are when the
step begins, the more of them count, and a network that is slow is hidden."""

MIN_EXTEND_INTERVAL_US = 3000
"""Time between two messages, over all sessions of a verifier, that costs it little: each takes its interpreter half a
millisecond."""

ROUND_TRIP_TOLERANCE = 0.05
"""Part of a step. A draft is told of a round trip that differs by more from what it was told."""


class DraftControl:
    """Of one session at a draft. `needed`: no token can be chosen without it, whether or not candidates pay."""

    def __init__(self, policy: draft_pb2.DraftPolicy, *, needed: bool) -> None:
        self._policy = policy  # as the draft was last told
        self._needed = needed
        self._unsent = model_pb2.Committed()
        self._step_us = 0.0  # moving average of T_v

    @property
    def paused(self) -> bool:
        """Whether nothing is worth guessing now."""
        return self._policy.paused

    def messages(self, commit: verifier_pb2.Commit) -> Iterator[draft_pb2.DraftRequest]:
        """What the target decided, and what is worth guessing; while nothing is, tokens are kept."""
        if commit.step_us:  # else it tells of steps long past
            self._step_us += 0.2 * (commit.step_us - self._step_us) if self._step_us else commit.step_us
        told, policy = self._policy, self._fitting(commit)
        if (
            policy.paused is not told.paused
            or _differ(policy.min_path_probability, told.min_path_probability)
            or _differ(policy.extend_interval_us, told.extend_interval_us)
            or abs(policy.round_trip_us - told.round_trip_us) > ROUND_TRIP_TOLERANCE * self._step_us
        ):
            self._policy = policy
            yield draft_pb2.DraftRequest(policy=policy)
        if not self._unsent.tokens:
            self._unsent.base = commit.committed.base
        self._unsent.tokens.extend(commit.committed.tokens)
        if not self.paused or len(self._unsent.tokens) >= PAUSED_COMMIT_TOKENS:
            yield draft_pb2.DraftRequest(committed=self._unsent)
            self._unsent = model_pb2.Committed()

    def another_verifier(self, max_nodes: int) -> Iterator[draft_pb2.DraftRequest]:
        """One that knows no candidates, and grants so many."""
        if max_nodes != self._policy.max_nodes:
            self._policy.max_nodes = max_nodes
            yield draft_pb2.DraftRequest(policy=self._policy)
        yield draft_pb2.DraftRequest(resend=draft_pb2.Resend())

    def _fitting(self, commit: verifier_pb2.Commit) -> draft_pb2.DraftPolicy:
        """The draft's policy as it should be now. Besides candidates for a verifier that has none, it sends several
        messages a step, but no more than all sessions together may, and one at least."""
        policy = draft_pb2.DraftPolicy()
        policy.CopyFrom(self._policy)
        pause = max(self._step_us / EXTENDS_A_STEP, MIN_EXTEND_INTERVAL_US * commit.drafted_sessions)
        policy.extend_interval_us = int(min(self._step_us, pause))
        policy.round_trip_us = commit.round_trip_us
        if not self._needed:
            policy.paused = not commit.drafting_wanted
            if not policy.paused:
                policy.min_path_probability = min_probability(commit.min_candidate_probability)
        return policy


def first_min_probability(worth: float) -> float:
    """Return from which path probability on a draft expands nodes before anything is decided, where a candidate pays
    from a probability of `worth` on."""
    return max(FIRST_MIN_PROBABILITY, min_probability(worth))


def min_probability(worth: float) -> float:
    """Return from which path probability on a draft expands nodes, where a candidate pays from `worth` on."""
    return PRICE_SHARE * worth


def _differ(new: float, told: float) -> bool:
    """Whether two values differ enough to be worth a message."""
    return abs(new - told) > 0.3 * max(new, told)
