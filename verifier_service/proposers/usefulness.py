"""The usefulness of a model inside the verifier: the tokens that its chains of candidates bring."""

from __future__ import annotations

from verifier_service.settings.tuning import DraftModelTuning


class Usefulness:
    """How much the model helps a text, or a tenant's texts, as moving averages: P(the next token of a chain is
    accepted), and the number of accepted tokens per chain. A text starts with its `tenant`'s values, and updates them
    too."""

    def __init__(self, tuning: DraftModelTuning, tenant: Usefulness | None = None) -> None:
        self._tuning = tuning
        self._tenant = tenant
        self.next_token_acceptance: float = tuning.first_acceptance
        self.expected_accepted: float = tuning.first_expected_accepted
        if tenant is not None:
            self.next_token_acceptance = tenant.next_token_acceptance
            self.expected_accepted = tenant.expected_accepted

    def observe_token(self, acceptance: float) -> None:
        """Add a token of a chain, with its probability of acceptance."""
        self.next_token_acceptance += self._tuning.smoothing * (acceptance - self.next_token_acceptance)
        if self._tenant is not None:
            self._tenant.observe_token(acceptance)

    def observe_chain(self, accepted: float) -> None:
        """Add a chain; `accepted`: its expected number of accepted tokens."""
        self.expected_accepted += self._tuning.smoothing * (accepted - self.expected_accepted)
        if self._tenant is not None:
            self._tenant.observe_chain(accepted)
