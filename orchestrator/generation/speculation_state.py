"""The speculation state of one sample: its verifier's last report, whether there is a draft, and the resulting
policies."""

from __future__ import annotations

from dataclasses import dataclass, replace

from orchestrator.generation.draft_control import first_min_probability
from orchestrator.requests.sample import Sample
from specdec.decoding.speculation import NO_DRAFT_PAYS, CandidateSource, Outlook, SpeculationOptions
from specdec.serving.messages import lookahead_message, outlook_from
from specdec.v2 import draft_pb2, verifier_pb2


@dataclass(frozen=True)
class SpeculationState:
    """An immutable value: every change makes a new one."""

    drafted: bool  # there is a draft, or hope of one
    max_nodes: int = 1  # limit on live candidates of the session, granted by the verifier
    outlook: Outlook = NO_DRAFT_PAYS

    def after_opened(self, opened: verifier_pb2.VerifyOpened) -> SpeculationState:
        """Return the state once a verifier has taken the text."""
        return replace(self, max_nodes=max(1, opened.max_nodes), outlook=outlook_from(opened))

    def after_commit(self, commit: verifier_pb2.Commit) -> SpeculationState:
        """Return the state after a commit."""
        return replace(self, outlook=outlook_from(commit))

    def worth_a_draft(self, sample: Sample) -> bool:
        """Return True if it pays to ask a draft. A verifier cannot judge that for a session it believes to have no
        draft: then one is tried."""
        return self.outlook.drafting_wanted or sample.forces_drafting or not self.drafted

    def verify_policy(self, speculation: SpeculationOptions, patience_seconds: float) -> verifier_pb2.VerifyPolicy:
        """Return the policy of the verifier. It may wait for candidates of a draft only if there is one, or hope of
        one."""
        drafters = speculation.drafters if self.drafted else speculation.drafters - {CandidateSource.REMOTE}
        return verifier_pb2.VerifyPolicy(
            drafters=sorted(drafters),  # type: ignore[arg-type]
            forced=speculation.forced,
            max_candidates=speculation.max_candidates,
            patience_us=int(1e6 * patience_seconds),
            lookahead=None if speculation.lookahead is None else lookahead_message(speculation.lookahead),
        )

    def draft_policy(self, sample: Sample) -> draft_pb2.DraftPolicy:
        """Return the opening policy for a session at a draft; `DraftControl` makes the later ones."""
        policy = draft_pb2.DraftPolicy(
            max_nodes=self.max_nodes,
            max_depth=sample.speculation.max_depth,
            max_branches=sample.speculation.max_branches,
        )
        if not sample.forces_drafting:
            policy.paused = not self.outlook.drafting_wanted
            policy.min_path_probability = first_min_probability(self.outlook.break_even)
        return policy
