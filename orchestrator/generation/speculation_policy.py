"""The speculation policies of a sample, for its verifier and its draft: derived from the verifier's reports."""

from __future__ import annotations

from dataclasses import dataclass, replace

from orchestrator.generation.sample_context import SampleContext
from orchestrator.requests.sample import Sample
from specdec.decoding.speculation import (
    NO_DRAFT_PAYS,
    RECENT_DRAFTERS,
    CandidateSource,
    Outlook,
    SpeculationOptions,
)
from specdec.serving.messages import lookahead_message, outlook_from
from specdec.v2 import draft_pb2, verifier_pb2

BREAK_EVEN_SHARE = 0.03
"""The min path probability sent to a draft, divided by the break-even probability. The draft's own limit applies if it
is higher. The ratio is far below 1 because a node's path probability rises once its ancestors are committed: a node
that does not pay now may pay a step later. (By `python -m bench simulate`: a ratio of 1 left nothing to expand ahead,
0.3 was still too high, and 0.1 gave eight sessions of a pod 8 % less throughput.)"""

FIRST_MIN_PROBABILITY = 0.1
"""Lower limit on the min path probability until the first commit. A first step does not wait for less probable nodes,
and on shared cores large trees would delay the prefills of other sessions."""


@dataclass(frozen=True)
class SpeculationState:
    """The state of a sample's speculation. Immutable: every change returns a new state.

    `Drafting` has the current state, and gives `Verification` each new policy for the verifier. Before that,
    `Verification` uses the policy of the initial state. `VerifierStream` and `DraftControl` keep the policy that they
    last sent.
    """

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
        if speculation.unspecified:
            drafters -= RECENT_DRAFTERS
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


def granted_nodes(asked: SpeculationOptions, credit: int) -> int:
    """Return the limit on a draft's live nodes: the smaller of the verifier's grant and the request's limit."""
    return min(credit, asked.max_nodes or credit)


def first_min_probability(break_even: float) -> float:
    """Return the min path probability for expanding nodes before the first commit."""
    return max(FIRST_MIN_PROBABILITY, min_probability(break_even))


def min_probability(break_even: float) -> float:
    """Return the min path probability for expanding nodes, given the break-even probability of a candidate."""
    return BREAK_EVEN_SHARE * break_even
