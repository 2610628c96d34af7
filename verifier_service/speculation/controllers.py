"""The controllers of a pod: one for each group of texts that have their usefulness in common.

How often candidates are right is a fact of a text and of its tenant. One tenant's texts must not decide how another's
are made, so each tenant's modes are measured by themselves: its tokens, in the time of all. For the same reason texts
whose drafts do not help are apart from the tenant's others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from verifier_service.sessions.session import Session
from verifier_service.settings.tuning import DEFAULTS, ControllerTuning
from verifier_service.speculation.controller import SpeculationController

MAX_GROUPS = 256
"""Groups whose statistics are kept; the one that was silent longest is forgotten first. Each takes some kilobytes."""


class Group(NamedTuple):
    """Texts that one controller selects modes for."""

    tenant: str
    drafted: bool  # a remote draft helps them, or may


class Controllers:
    """The controllers, by group. With `shared` there is one for all texts: modes that are known, or measured apart."""

    def __init__(
        self, tuning: ControllerTuning = DEFAULTS.controller, shared: SpeculationController | None = None
    ) -> None:
        self._tuning = tuning
        self._shared = shared
        self._known: OrderedDict[Group, SpeculationController] = OrderedDict()

    def of(self, session: Session) -> SpeculationController:
        """Return the controller of a session, a new one if its group is not known. Changes nothing: any thread may
        ask."""
        if self._shared is not None:
            return self._shared
        return self._known.get(_group(session)) or SpeculationController(self._tuning)

    def select(self, sessions: Iterable[Session]) -> list[tuple[SpeculationController, list[Session]]]:
        """Return the sessions of a step by controller, and keep these controllers."""
        if self._shared is not None:
            return [(self._shared, list(sessions))]
        grouped: dict[Group, list[Session]] = {}
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


def _group(session: Session) -> Group:
    return Group(session.request.tenant, session.policy.remote and session.draft_gain.helps)
