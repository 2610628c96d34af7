"""Step retry: each session of a failed step is tried again in a step of its own, so that one that cannot be computed is
found, and ended without the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Generic, TypeVar

Session = TypeVar("Session")


class StepRetry(Generic[Session]):
    """The sessions of one loop that are on trial. Belongs to the loop's thread."""

    def __init__(self) -> None:
        self._failures: Counter[Session] = Counter()  # in a row, by session on trial, in order

    def next(self, ready: Collection[Session]) -> Session | None:
        """Choose the session that has the next step for itself; None if all may share it."""
        return next((session for session in self._failures if session in ready), None)

    def failed(self, sessions: Sequence[Session]) -> Session | None:
        """Note that a step of these sessions has failed. Return the one to be ended, which has failed before and now
        alone; None if there is none."""
        self._failures.update(sessions)
        (session, *others) = sessions
        if others or self._failures[session] < 2:
            return None
        self.forget(session)
        return session

    def forget(self, session: Session) -> None:
        """Take a session off trial: it has had a step, or is gone."""
        self._failures.pop(session, None)
