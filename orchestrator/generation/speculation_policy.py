"""The speculation policies of a sample, for its verifier and its draft: derived from the verifier's reports."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from orchestrator.generation.sample_context import SampleContext
from orchestrator.requests.sample import Sample
from specdec.decoding.speculation import NO_DRAFT_PAYS, CandidateSource, Outlook, SpeculationOptions
from specdec.serving.messages import lookahead_message, outlook_from
from specdec.v2 import draft_pb2, model_pb2, verifier_pb2


@dataclass(frozen=True)
class SpeculationState:
    """The state of a sample's speculation. Immutable: every change returns a new state."""

    drafted: bool  # a draft has the text, or may soon have it
    max_nodes: int = 1  # limit on live candidates of the session, granted by the verifier
    outlook: Outlook = NO_DRAFT_PAYS
    overruled_logprobs: int = 0  # number of the target's likeliest tokens to report to a draft that keeps the text
    partial_distributions: bool = False  # the verifier accepts them, and queries the rest (CONTRASTIVE)
    features: str = ""  # fingerprint of the features that the verifier can send; empty: none
    features_session: int = 0  # number of the draft session that reads them; 0: none

    @classmethod
    def initial(cls, context: SampleContext) -> SpeculationState:
        """Return the state of a sample before any verifier has taken it."""
        drafts = context.peers.drafts
        return cls(drafted=context.sample.speculation.remote and drafts is not None and bool(drafts.willing))

    def after_opened(self, opened: verifier_pb2.VerifyOpened) -> SpeculationState:
        return replace(
            self,
            max_nodes=max(1, opened.max_nodes),
            outlook=outlook_from(opened),
            partial_distributions=opened.takes_partial_distributions,
            features=opened.features_fingerprint,
        )

    def after_commit(self, commit: verifier_pb2.Commit) -> SpeculationState:
        return replace(self, outlook=outlook_from(commit))

    def worth_a_draft(self, sample: Sample) -> bool:
        """Return True if a draft may pay. Without a draft the verifier cannot tell, so one is tried."""
        return self.outlook.drafting_wanted or sample.forces_drafting or not self.drafted

    def verify_policy(self, context: SampleContext) -> verifier_pb2.VerifyPolicy:
        """Return a new policy message for the verifier, which may wait for a draft's candidates only if the text is
        `drafted`."""
        speculation = context.sample.speculation
        drafters = speculation.drafters if self.drafted else speculation.drafters - {CandidateSource.REMOTE}
        if speculation.unspecified:  # verifiers of the previous version refuse unknown drafters
            drafters -= {CandidateSource.HEADS}
        return verifier_pb2.VerifyPolicy(
            drafters=sorted(drafters),  # type: ignore[arg-type]
            forced=speculation.forced,
            max_candidates=speculation.max_candidates,
            patience_us=int(1e6 * context.peers.patience_seconds),
            lookahead=None if speculation.lookahead is None else lookahead_message(speculation.lookahead),
            jacobi=speculation.jacobi,
            max_depth=speculation.max_depth,
            unspecified=speculation.unspecified,
            overruled_logprobs=self.overruled_logprobs,
            features_session=self.features_session,
        )

    def draft_policy(self, sample: Sample) -> draft_pb2.DraftPolicy:
        """Return the opening policy for a session at a draft; `DraftControl` makes the later ones."""
        speculation = sample.speculation
        policy = draft_pb2.DraftPolicy(
            max_nodes=granted_nodes(speculation, self.max_nodes),
            max_depth=speculation.max_depth,
            max_branches=speculation.max_branches,
            min_path_probability=speculation.min_path_probability,
            scorer=speculation.scorer or 0,  # type: ignore[arg-type]
            expansion=speculation.expansion,
            partial_distributions=self.partial_distributions and sample.needs_draft,
        )
        if not sample.forces_drafting:
            policy.paused = not self.outlook.drafting_wanted
            least = first_min_probability(self.outlook.break_even)
            policy.min_path_probability = max(least, speculation.min_path_probability)
        return policy


BREAK_EVEN_SHARE = 0.03
"""The min path probability sent to a draft, divided by the break-even probability. The draft's own limit applies if it
is higher. The ratio is far below 1 because a node's path probability rises once its ancestors are committed: a node
that does not pay now may pay a step later. (By `python -m bench simulate`: a ratio of 1 left nothing to expand ahead,
0.3 was still too high, and 0.1 gave eight sessions of a pod 8 % less throughput.)"""

FIRST_MIN_PROBABILITY = 0.1
"""Lower limit on the min path probability until the first commit. A first step does not wait for less probable nodes,
and on shared cores large trees would delay the prefills of other sessions."""

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
        self._policy = policy  # as last sent
        self._asked = asked or SpeculationOptions()
        self._needed = needed
        self._unsent = model_pb2.Committed()
        self._step_us = 0.0  # moving average of T_v

    @property
    def paused(self) -> bool:
        """True if nothing is worth proposing now."""
        return self._policy.paused

    def messages(self, commit: verifier_pb2.Commit, *, learns: bool = False) -> Iterator[draft_pb2.DraftRequest]:
        """Yield the messages for a commit: the target's decisions, and the policy if it has changed. While the draft is
        paused, tokens are held back to be sent together. `learns`: the target's log-probabilities are included."""
        if commit.step_us:  # 0: sent outside of any step, with the results of earlier ones
            self._step_us += 0.2 * (commit.step_us - self._step_us) if self._step_us else commit.step_us
        sent, policy = self._policy, self._fitting(commit)
        if (
            policy.paused is not sent.paused
            or _differ(policy.min_path_probability, sent.min_path_probability)
            or _differ(policy.extend_interval_us, sent.extend_interval_us)
            or abs(policy.round_trip_us - sent.round_trip_us) > ROUND_TRIP_TOLERANCE * self._step_us
        ):
            self._policy = policy
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
        sent, max_nodes = self._policy, granted_nodes(self._asked, state.max_nodes)
        partial = state.partial_distributions and self._needed
        if (max_nodes, partial) != (sent.max_nodes, sent.partial_distributions):
            self._policy = draft_pb2.DraftPolicy()
            self._policy.CopyFrom(sent)
            self._policy.max_nodes, self._policy.partial_distributions = max_nodes, partial
            yield draft_pb2.DraftRequest(policy=self._policy)
        yield draft_pb2.DraftRequest(resend=draft_pb2.Resend())

    def _fitting(self, commit: verifier_pb2.Commit) -> draft_pb2.DraftPolicy:
        """Return the policy the draft should have now. It allows up to `EXTENDS_A_STEP` messages a step: no more than
        the session's share of the limit for all sessions, but at least one."""
        policy = draft_pb2.DraftPolicy()
        policy.CopyFrom(self._policy)
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


def granted_nodes(asked: SpeculationOptions, credit: int) -> int:
    """Return the limit on a draft's live nodes: the smaller of the verifier's grant and the request's limit."""
    return min(credit, asked.max_nodes or credit)


def first_min_probability(break_even: float) -> float:
    """Return the min path probability for expanding nodes before the first commit."""
    return max(FIRST_MIN_PROBABILITY, min_probability(break_even))


def min_probability(break_even: float) -> float:
    """Return the min path probability for expanding nodes, given the break-even probability of a candidate."""
    return BREAK_EVEN_SHARE * break_even


def _differ(new: float, sent: float) -> bool:
    """Return True if two values differ by over 30 %: a smaller change is not worth a message."""
    return abs(new - sent) > 0.3 * max(new, sent)
