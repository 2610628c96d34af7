"""The control of a session at a draft: its policy and its commits, derived from the verifier's commits."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.generation.speculation_policy import SpeculationState, granted_nodes, min_probability
from specdec.decoding.speculation import SpeculationOptions
from specdec.serving.messages import outlook_from
from specdec.v2 import draft_pb2, model_pb2, verifier_pb2

PAUSED_COMMIT_TOKENS = 64
"""Tokens sent together to a paused draft, so that little is left to read when it resumes."""

EXTENDS_A_STEP = 4
"""Messages of candidates per verifier step, fewer if `MIN_EXTEND_INTERVAL_US` requires it. Frequent messages bring more
candidates to the verifier before a step begins, and hide a slow network."""

MIN_EXTEND_INTERVAL_US = 500
"""Shortest interval in microseconds between two messages, over all sessions of a verifier. At this rate messages cost
the verifier little: less than 0.1 ms each (by the processor time of a token in `python -m bench device`, with drafting
forced and with drafting off)."""

ROUND_TRIP_TOLERANCE = 0.05
"""Change of the round trip, as a share of a step, above which the draft gets the new value."""


class DraftControl:
    """Controls one session at a draft: its policy, and the commits it receives. `needed`: no token can be chosen
    without the draft, so it drafts even if candidates do not pay; `asked`: the request's options for candidates."""

    def __init__(self, policy: draft_pb2.DraftPolicy, asked: SpeculationOptions | None = None, *, needed: bool) -> None:
        self.policy = policy  # as last sent
        self._asked = asked or SpeculationOptions()
        self._needed = needed
        self._unsent = model_pb2.Committed()
        self._step_us = 0.0  # moving average of T_v

    @property
    def paused(self) -> bool:
        """True if nothing is worth proposing now."""
        return self.policy.paused

    def messages(self, commit: verifier_pb2.Commit, *, learns: bool = False) -> Iterator[draft_pb2.DraftRequest]:
        """Yield the messages for a commit: the target's decisions, and the policy if it has changed. While the draft is
        paused, tokens are held back to be sent together. `learns`: the target's log-probabilities are included."""
        if commit.step_us:  # 0: sent outside of any step, with the results of earlier ones
            self._step_us += 0.2 * (commit.step_us - self._step_us) if self._step_us else commit.step_us
        sent, policy = self.policy, self._fitting(commit)
        if (
            policy.paused is not sent.paused
            or _differ(policy.min_path_probability, sent.min_path_probability)
            or _differ(policy.extend_interval_us, sent.extend_interval_us)
            or abs(policy.round_trip_us - sent.round_trip_us) > ROUND_TRIP_TOLERANCE * self._step_us
        ):
            self.policy = policy
            yield draft_pb2.DraftRequest(policy=policy)
        if not self._unsent.tokens:
            self._unsent.base = commit.committed.base
        self._unsent.tokens.extend(commit.committed.tokens)
        if learns:
            self._unsent.overruled.extend(commit.committed.overruled)
        if not self.paused or len(self._unsent.tokens) >= PAUSED_COMMIT_TOKENS:
            yield from self.held_back()

    def held_back(self) -> Iterator[draft_pb2.DraftRequest]:
        """Yield a message with the tokens that were held back, if any."""
        if self._unsent.tokens:
            yield draft_pb2.DraftRequest(committed=self._unsent)
            self._unsent = model_pb2.Committed()

    def another_verifier(self, state: SpeculationState) -> Iterator[draft_pb2.DraftRequest]:
        """Yield the messages for a move to another verifier, which has its own grants and no candidates."""
        sent, max_nodes = self.policy, granted_nodes(self._asked, state.max_nodes)
        partial = state.partial_distributions and self._needed
        if (max_nodes, partial) != (sent.max_nodes, sent.partial_distributions):
            self.policy = draft_pb2.DraftPolicy()
            self.policy.CopyFrom(sent)
            self.policy.max_nodes, self.policy.partial_distributions = max_nodes, partial
            yield draft_pb2.DraftRequest(policy=self.policy)
        yield draft_pb2.DraftRequest(resend=draft_pb2.Resend())

    def _fitting(self, commit: verifier_pb2.Commit) -> draft_pb2.DraftPolicy:
        """Return the policy the draft should have now. It allows up to `EXTENDS_A_STEP` messages a step: no more than
        the session's share of the limit for all sessions, but at least one."""
        policy = draft_pb2.DraftPolicy()
        policy.CopyFrom(self.policy)
        pause = max(self._step_us / EXTENDS_A_STEP, MIN_EXTEND_INTERVAL_US * commit.drafted_sessions)
        policy.extend_interval_us = int(min(self._step_us, pause))
        policy.round_trip_us = commit.round_trip_us
        if not self._needed:
            outlook = outlook_from(commit)
            policy.paused = not outlook.drafting_wanted
            if not policy.paused:
                least = min_probability(outlook.break_even)
                policy.min_path_probability = max(least, self._asked.min_path_probability)
        return policy


def _differ(new: float, sent: float) -> bool:
    """Return True if two values differ by over 30 %: a smaller change is not worth a message."""
    return abs(new - sent) > 0.3 * max(new, sent)
