"""Draft control: what the orchestrator tells a draft with each commit, the new tokens and what is worth proposing."""

from __future__ import annotations

from collections.abc import Iterator

from specdec.v2 import draft_pb2, model_pb2, verifier_pb2

PRICE_SHARE = 0.03
"""Share of the min candidate probability from which on a draft expands nodes, by path probability; the draft's own
limit holds if that is higher. What will be worth verifying a step later is less probable than what is verified now. (A
share of 1 left nothing to expand ahead, 0.3 was still too much, and 0.1 brought eight sessions of a pod 8 % less, by
`python -m bench simulate`.)"""

FIRST_MIN_PROBABILITY = 0.1
"""Path probability from which on, at least, a draft expands nodes until the first commit. They are what a first step
can use: nobody waits for more, and on shared cores large trees below all prompts of a crowd would delay the prompts."""

PAUSED_COMMIT_TOKENS = 64
"""Tokens that a paused draft receives together, so that it has little to read when it is wanted again."""

EXTENDS_A_STEP = 4
"""Messages of candidates for each step of a verifier, where it can take so many: the fresher candidates are when the
step begins, the more of them count, and a slow network is hidden."""

MIN_EXTEND_INTERVAL_US = 3000
"""Microseconds between two messages, over all sessions of a verifier, that cost it little: each message takes its
interpreter half a millisecond."""

ROUND_TRIP_TOLERANCE = 0.05
"""Share of a step. A draft is sent a new round trip if that differs by more from the one sent last."""


class DraftControl:
    """The draft control of one session at a draft. `needed`: no token can be chosen without the draft, whether or not
    candidates pay."""

    def __init__(self, policy: draft_pb2.DraftPolicy, *, needed: bool) -> None:
        self._policy = policy  # as it was last sent
        self._needed = needed
        self._unsent = model_pb2.Committed()
        self._step_us = 0.0  # moving average of T_v

    @property
    def paused(self) -> bool:
        """True if nothing is worth proposing now."""
        return self._policy.paused

    def messages(self, commit: verifier_pb2.Commit) -> Iterator[draft_pb2.DraftRequest]:
        """Yield the messages for a commit: what the target decided, and what is worth proposing. While nothing is,
        tokens are kept, to be sent together."""
        if commit.step_us:  # 0: the commit is of earlier steps
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
        """Yield the messages for a move to another verifier, which has none of the candidates and grants
        `max_nodes`."""
        if max_nodes != self._policy.max_nodes:
            self._policy.max_nodes = max_nodes
            yield draft_pb2.DraftRequest(policy=self._policy)
        yield draft_pb2.DraftRequest(resend=draft_pb2.Resend())

    def _fitting(self, commit: verifier_pb2.Commit) -> draft_pb2.DraftPolicy:
        """Return the draft's policy as it should be now. Besides candidates for a verifier that has none, the draft
        sends several messages a step: no more than its share of what all sessions may send, and one at least."""
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
    """Return the path probability from which on a draft expands nodes before the first commit, where a candidate pays
    from a probability of `worth` on."""
    return max(FIRST_MIN_PROBABILITY, min_probability(worth))


def min_probability(worth: float) -> float:
    """Return the path probability from which on a draft expands nodes, where a candidate pays from `worth` on."""
    return PRICE_SHARE * worth


def _differ(new: float, told: float) -> bool:
    """Return True if two values differ enough to be worth a message."""
    return abs(new - told) > 0.3 * max(new, told)
