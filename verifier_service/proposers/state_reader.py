"""Readers of the target's own states: heads, which guess from them, and the source of features for drafts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar, Generic, TypeVar

import structlog

from specdec.engine.engine import Engine, Launch
from verifier_service.proposers.proposer import Proposer
from verifier_service.sessions.session import VerifierSession
from verifier_service.sessions.step_rows import ScheduledRows
from verifier_service.verification.tree_verification import TreeVerification

log = structlog.get_logger()

State = TypeVar("State")


class StateReader(Proposer, Generic[State]):
    """Reads the target's states at the rows of each text, and keeps a `State` of the text. Owned by the step loop's
    thread. After a failure it is not used again; no token is lost."""

    failure: ClassVar[str]  # log event

    def __init__(self) -> None:
        self.works = True
        self._texts: dict[VerifierSession, State] = {}

    @abstractmethod
    def launch_of(self, engine: Engine) -> Launch:
        """Return the function that launches the target's passes with the states to read."""

    @abstractmethod
    def _reads(self, session: VerifierSession) -> bool:
        """Return whether to read the states of a session's rows."""

    def forget(self, session: VerifierSession) -> None:
        self._texts.pop(session, None)

    @contextmanager
    def _failing_alone(self) -> Iterator[None]:
        """Stop reading on an error, without failing the step."""
        try:
            yield
        except Exception as error:
            log.error(self.failure, exc_info=error)
            self.works = False
            for session in list(self._texts):
                self.forget(session)

    def _continuing(self, verifications: Sequence[TreeVerification]) -> list[TreeVerification]:
        """Return the verifications of texts that go on and are read."""
        return [
            verification
            for verification in verifications
            if verification.error is None and not verification.result.finish and self._reads(verification.session)
        ]


def rows_before_root(
    session: VerifierSession, planned: ScheduledRows, context: int, length: int
) -> tuple[int, Sequence[int]]:
    """Return a session's rows of committed tokens in a step, without the root's and without rows more than `context`
    tokens before `length`: the position of the first row, and the places of all in the batch."""
    count = planned.count - (planned.root_row is not None)
    skipped = min(max(0, length - context - session.computed), count)
    return session.computed + skipped, range(planned.first_row + skipped, planned.first_row + count)
