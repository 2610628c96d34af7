"""The drafter: what extends the token trees of a draft service's sessions.

The draft loop has one, and calls it in its thread. A language model is one (`language_model.py`); heads on the target's
hidden states, an n-gram index or a suffix cache on a machine of its own are others, a file each. Texts, trees, commits,
calibration, sending and policies are not a drafter's business: `Session` does that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from draft_service.session import RootMove, Session
from specdec.decoding.sampling import Rule


class ExpansionError(Exception):
    """An error that says that an expansion has failed, by its `cause`, and gave none of its `sessions` anything."""

    def __init__(self, sessions: Sequence[Session], cause: Exception) -> None:
        super().__init__(f"the expansion of {len(sessions)} sessions failed: {cause}")
        self.sessions = sessions
        self.cause = cause


class Drafter(ABC):
    """A drafter of many sessions. One that keeps nothing of a session needs `expand` alone."""

    rules: frozenset[Rule] = frozenset({Rule.COUPLED})
    """Acceptance rules that it can draft for. COUPLED takes children from anywhere; REJECTION wants draws from a
    distribution that goes with them, CONTRASTIVE distributions of the whole vocabulary."""

    @property
    def slots(self) -> int:
        """Slots of KV memory for sessions; 0 if it has no such memory. Any thread may ask."""
        return 0

    @property
    def slots_used(self) -> int:
        """Those of them that sessions have. Any thread may ask."""
        return 0

    def open(self, session: Session) -> None:  # noqa: B027 -- not every drafter has memory of its own
        """Prepare for a session; PoolFullError if there is no memory for it."""

    def commit(self, session: Session, move: RootMove) -> None:  # noqa: B027 -- the tree may say all
        """Follow a commit: the root of the session's tree has moved."""

    def best_logprob(self, session: Session) -> float:
        """Return the path logprob of what it would expand next for this session; -inf if nothing is worth it."""
        return session.best_logprob()

    @abstractmethod
    def expand(self, sessions: Sequence[Session]) -> Mapping[Session, Exception]:
        """Give the best nodes of sessions children, as many as make a good step. Each session has something to expand;
        the one with the most probable node comes first. Return the sessions that cannot go on, and why; ExpansionError
        if all of it failed. Any other error counts as a failure of all these sessions: they are tried one by one, and
        one that fails alone ends."""

    def close(self, session: Session) -> None:  # noqa: B027 -- as with `open`
        """Forget an open session."""

    def recover(self) -> bool:
        """Return whether it works again, after an expansion has failed."""
        return True
