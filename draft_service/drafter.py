"""The drafter of a draft service: extends the token trees of its sessions.

The draft loop owns one drafter and calls it in its own thread. `language_model.py` has the drafter that runs a draft
model, `heads.py` one that runs heads on the target's features, `versions.py` one that holds several versions of a
model. Other drafters, such as an n-gram index or a suffix cache on a separate machine, would be one file each.
`DrafterSession` handles texts, trees, commits, calibration, sending and policies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from draft_service.session import DrafterSession, RootMove
from specdec.decoding.sampling import Rule


class ExpansionError(Exception):
    """A failed expansion: none of `sessions` got any children, because of `cause`."""

    def __init__(self, sessions: Sequence[DrafterSession], cause: Exception) -> None:
        super().__init__(f"the expansion of {len(sessions)} sessions failed: {cause}")
        self.sessions = sessions
        self.cause = cause


class FeatureFormat(NamedTuple):
    """Features of the target that a drafter reads, as in `specdec.v2.FeatureFormat`."""

    fingerprint: str
    width: int


class Drafter(ABC):
    """A drafter of many sessions. A drafter without per-session state implements only `expand`."""

    rules: frozenset[Rule] = frozenset({Rule.COUPLED})
    """Acceptance rules that the drafter supports. COUPLED accepts children from any source; REJECTION needs draws
    and the distribution they were drawn from; CONTRASTIVE needs distributions over the whole vocabulary."""

    features: FeatureFormat | None = None
    """The target's features that the drafter reads; None if it reads none."""

    @property
    def slots(self) -> int:
        """KV slots for sessions; 0 without KV memory. Thread-safe."""
        return 0

    @property
    def slots_used(self) -> int:
        """KV slots held by sessions. Thread-safe."""
        return 0

    def open(self, session: DrafterSession) -> None:  # noqa: B027 -- not every drafter has memory of its own
        """Prepare for a session; PoolFullError if there is no memory for it."""

    def commit(self, session: DrafterSession, move: RootMove) -> None:  # noqa: B027 -- the tree may suffice
        """Follow a commit: the root of the session's tree has moved."""

    def add_features(self, session: DrafterSession, first: int, values: bytes) -> None:
        """Add features of a session's text, starting at position `first`. They arrive before the commit of the token
        after them. ValueError unless they are one or more whole rows."""
        raise ValueError("this draft reads no features")

    def best_logprob(self, session: DrafterSession) -> float:
        """Return the path logprob of the session's next node to expand; -inf if none is worth expanding."""
        return session.best_logprob()

    @abstractmethod
    def expand(self, sessions: Sequence[DrafterSession]) -> Mapping[DrafterSession, Exception]:
        """Give children to the sessions' best nodes, up to the number that makes an efficient step. Every session has a
        node to expand; those with the likeliest nodes come first.

        Return the sessions that cannot continue, with the reason. ExpansionError if the whole expansion failed. Any
        other error counts as a failure of all `sessions`: the loop retries them one at a time, and ends a session that
        fails alone.
        """

    def close(self, session: DrafterSession) -> None:  # noqa: B027 -- as with `open`
        """Forget an open session."""

    def recover(self) -> bool:
        """Return True if the drafter works again after a failed expansion."""
        return True
