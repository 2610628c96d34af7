"""Step retry: reruns the sessions of a failed step one by one to find the one that fails, and ends it without the
others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Generic, TypeVar

Session = TypeVar("Session")


class StepRetry(Generic[Session]):
    """The sessions of one loop that are on trial. Belongs to the loop's thread."""

    def __init__(self) -> None:
        self._failures: Counter[Session] = Counter()  # consecutive failures by session on trial, in order

    def next(self, ready: Collection[Session]) -> Session | None:
        """Return the session to step alone next; None if none is on trial."""
        return next((session for session in self._failures if session in ready), None)

    def failed(self, sessions: Sequence[Session]) -> Session | None:
        """Record a failed step. Return the session to be ended, which has now failed alone after an earlier failure;
        None if there is none."""
        self._failures.update(sessions)
        (session, *others) = sessions
        if others or self._failures[session] < 2:
            return None
        self.forget(session)
        return session

    def forget(self, session: Session) -> None:
        """Take a session off trial: its step succeeded, or it is gone."""
        self._failures.pop(session, None)
