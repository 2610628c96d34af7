"""Traffic: the texts that a draft may learn from, in memory only.

A text is kept when its session ends, if its request permits it; the oldest texts are evicted. A text with several
sessions, one after another, is kept once. Forgetting a tenant deletes its texts immediately, and its running texts are
not kept either (`forgotten.py`).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from draft_service.forgotten import Forgotten
from draft_service.session import DrafterSession
from specdec.serving.target_logprobs import NO_PLACES, PLACE_BYTES, PackedPlaces

MAX_KEPT_TOKENS = 1 << 28
"""Limit on the tokens kept: with the indices of overruled ones, they take up to 2 GB."""


MAX_SEARCHED_TEXTS = 1024
"""Maximum texts searched for the beginning of another, in the draft loop's thread."""


@dataclass(eq=False)
class KeptText:
    """A text to learn from. Only `places` ever changes."""

    tenant: str
    tokens: NDArray[np.uint32]  # prompt first
    prompt: int  # number of prompt tokens
    overruled: NDArray[np.uint32]  # indices of tokens that are not the draft's likeliest guess, ascending
    kept_at: float  # by the `clock` of `Traffic`
    places: PackedPlaces = NO_PLACES  # the target's log-probabilities at some overruled tokens

    def continues(self, other: KeptText, begun: int) -> bool:
        """Return whether this text begins with the other one, which has at most `begun` tokens."""
        return (
            (other.tenant, other.prompt) == (self.tenant, self.prompt)
            and len(other.tokens) <= begun
            and np.array_equal(other.tokens, self.tokens[: len(other.tokens)])
        )

    def with_labels_of(self, begin: KeptText) -> KeptText:
        """Return this text with the labels of its beginning, which an earlier session has kept."""
        overruled, places = np.union1d(begin.overruled, self.overruled), begin.places.before(self.places)
        return replace(self, overruled=overruled, places=places)

    def last(self, most: int, most_places: int) -> KeptText:
        """Return the last `most` tokens, with at most the last `most_places` places: copies, so that the rest can be
        freed."""
        cut = max(0, len(self.tokens) - most)
        return replace(
            self,
            tokens=self.tokens[cut:].copy(),
            prompt=max(0, self.prompt - cut),
            overruled=self.overruled[self.overruled >= cut] - np.uint32(cut),
            places=self.places.after(cut).last(most_places) if len(self.places) else NO_PLACES,
        )


class Kept(NamedTuple):
    """How much is kept."""

    texts: int
    tokens: int
    age: float  # seconds since the oldest text was kept
    logprob_bytes: int  # of the target's log-probabilities


NOTHING_KEPT = Kept(0, 0, 0.0, 0)


class Traffic:
    """The last `most` tokens of texts that permit learning. Thread-safe."""

    def __init__(
        self,
        most: int,
        forgotten: Forgotten | None = None,
        clock: Callable[[], float] = time.monotonic,
        most_bytes: int = 0,
    ) -> None:
        """`most_bytes`: limit on the bytes of the target's log-probabilities; 0: none are kept or requested."""
        self.most_places = most_bytes // PLACE_BYTES
        """Limit on the places with log-probabilities, over all texts."""
        self._places = 0
        self._with_places: deque[KeptText] = deque()  # texts with log-probabilities, oldest first
        self._most = most
        self.forgotten = forgotten or Forgotten()
        self._clock = clock
        self._lock = threading.Lock()
        self._texts: deque[KeptText] = deque()
        self._tokens = 0

    def keeps(self, session: DrafterSession) -> bool:
        """Return True if the text of a session will be kept, unless its tenant is forgotten before it ends."""
        request = session.request
        return request.learn and not self.forgotten.keeps_out(request.tenant, session.begun)

    def keep(self, session: DrafterSession) -> bool:
        """Keep the text of a session that ends, if its request permits it and its tenant was not forgotten since the
        text began. Only the last tokens of an overlong text are kept. Return True if it was kept."""
        request = session.request
        if not request.learn or session.tree.base == len(request.prompt):  # the target has added no token
            return False
        text = KeptText(
            request.tenant,
            np.asarray(session.tree.committed, dtype=np.uint32),
            len(request.prompt),
            np.asarray(session.overruled, dtype=np.uint32),
            self._clock(),
            PackedPlaces.of(session.places) if session.places else NO_PLACES,
        )
        with self._lock:
            if not self.keeps(session):
                return False
            if request.generated:  # opened mid-text: an earlier session may have kept the beginning
                text = self._joined(text, len(request.prompt) + len(request.generated))
            text = text.last(self._most, self.most_places)
            self._texts.append(text)
            self._tokens += len(text.tokens)
            self._places += len(text.places)
            if len(text.places):
                self._with_places.append(text)
            while self._tokens > self._most:
                gone = self._texts.popleft()
                self._tokens -= len(gone.tokens)
                if len(gone.places):
                    self._drop_places()  # the oldest places are this text's
            while self._places > self.most_places:
                self._drop_places()
        return True

    def _joined(self, text: KeptText, begun: int) -> KeptText:
        """Return a text whose session opened with `begun` tokens. If its beginning is among the last kept texts, remove
        it there and add its labels to the text."""
        recent = enumerate(islice(reversed(self._texts), MAX_SEARCHED_TEXTS), 1)
        back, begin = next(((back, kept) for back, kept in recent if text.continues(kept, begun)), (0, None))
        if begin is None:
            return text
        del self._texts[-back]
        self._tokens -= len(begin.tokens)
        if len(begin.places):
            self._with_places.remove(begin)
            self._places -= len(begin.places)
        return text.with_labels_of(begin)

    def _drop_places(self) -> None:
        """Drop the log-probabilities of the oldest text that has some."""
        text = self._with_places.popleft()
        self._places -= len(text.places)
        text.places = NO_PLACES

    def forget(self, tenant: str) -> tuple[int, int]:
        """Delete the texts of a tenant that is in `forgotten`; return the numbers of deleted texts and tokens."""
        with self._lock:
            gone = [text for text in self._texts if text.tenant == tenant]
            self._texts = deque(text for text in self._texts if text.tenant != tenant)
            tokens = sum(len(text.tokens) for text in gone)
            self._tokens -= tokens
            self._with_places = deque(text for text in self._with_places if text.tenant != tenant)
            self._places = sum(len(text.places) for text in self._with_places)
        return len(gone), tokens

    def texts(self) -> list[KeptText]:
        """Return the kept texts, oldest first."""
        with self._lock:
            return list(self._texts)

    def kept(self) -> Kept:
        with self._lock:
            age = self._clock() - self._texts[0].kept_at if self._texts else 0.0
            return Kept(len(self._texts), self._tokens, age, self._places * PLACE_BYTES)
