"""The controllers of a pod: one per group of texts with similar acceptance.

Acceptance depends on the text and its tenant. One tenant's texts must not decide another's modes, so each tenant's
modes are measured separately: its own tokens, over the time of all. For the same reason, texts with unhelpful drafts
are separate from the tenant's others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from verifier_service.sessions.session import VerifierSession
from verifier_service.settings.tuning import DEFAULTS, ControllerTuning
from verifier_service.speculation.controller import SpeculationController

MAX_GROUPS = 256
"""Groups with kept statistics; the least recently active one is forgotten first. Each takes a few kilobytes."""


class ControllerGroup(NamedTuple):
    """Texts with a common controller."""

    tenant: str
    drafted: bool  # a remote draft helps them, or is on trial


class Controllers:
    """The controllers, by group. `shared`: a single one for all texts, for known or separately measured modes."""

    def __init__(
        self, tuning: ControllerTuning = DEFAULTS.controller, shared: SpeculationController | None = None
    ) -> None:
        self._tuning = tuning
        self._shared = shared
        self._known: OrderedDict[ControllerGroup, SpeculationController] = OrderedDict()

    def of(self, session: VerifierSession) -> SpeculationController:
        """Return the controller of a session, a new one if its group is unknown. No side effects; thread-safe."""
        if self._shared is not None:
            return self._shared
        return self._known.get(_group(session)) or SpeculationController(self._tuning)

    def select(self, sessions: Iterable[VerifierSession]) -> list[tuple[SpeculationController, list[VerifierSession]]]:
        """Return the sessions of a step by controller, and keep these controllers."""
        if self._shared is not None:
            return [(self._shared, list(sessions))]
        grouped: dict[ControllerGroup, list[VerifierSession]] = {}
        for session in sessions:
            grouped.setdefault(_group(session), []).append(session)
        found = []
        for group, members in grouped.items():
            if group not in self._known:
                self._known[group] = SpeculationController(self._tuning)
            self._known.move_to_end(group)
            found.append((self._known[group], members))
        while len(self._known) > max(MAX_GROUPS, len(found)):
            self._known.popitem(last=False)
        return found


def _group(session: VerifierSession) -> ControllerGroup:
    return ControllerGroup(session.request.tenant, session.policy.remote and session.draft_gain.helps)
