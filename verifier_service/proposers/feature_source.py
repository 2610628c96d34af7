"""The source of features for draft services with heads; it proposes nothing itself.

It reads committed rows like heads in the verifier (`feature_heads.py`), but only fuses their features. The last rows of
a text are kept, and sent to its draft before the commit of the token after them. So a draft that takes over a text gets
the rows that its predecessor had. Rows found in the prefix cache have no features. No token depends on features.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.decoding.sampling import Rule
from specdec.decoding.step_logits import StepLogits
from specdec.engine.engine import Engine, Launch, launch_of
from specdec.engine.heads.fusion import Fusion, as_bytes
from verifier_service.backend.result import FeatureRows
from verifier_service.proposers.proposer import NO_PROPOSALS, ComingStep, ProposalStats
from verifier_service.proposers.state_reader import StateReader, rows_before_root
from verifier_service.sessions.session import VerifierSession
from verifier_service.verification.tree_verification import Prompts, TreeVerification

MAX_WINDOW_BYTES = 8 << 20
"""Maximum bytes kept of a text, in host memory."""

DRAFTED = frozenset({Rule.COUPLED, Rule.TYPICAL})
"""Rules under which heads in a draft service propose."""


class KeptRows:
    """The last rows of a text, at most `most`, at consecutive positions: `rows[i]` is at `end - len(rows) + i`."""

    def __init__(self, most: int) -> None:
        self.end = 0
        self.rows: deque[bytes] = deque(maxlen=most)
        self._sent = 0  # rows before this position were sent
        self._session = 0  # number of the draft session that got them

    def add(self, first: int, rows: Sequence[bytes]) -> None:
        """Add rows starting at position `first`. After a gap, drop the earlier rows as useless."""
        if first != self.end:
            self.rows.clear()
        self.rows += rows
        self.end = first + len(rows)

    def unsent(self, session: int) -> FeatureRows | None:
        """Return the rows that the draft session with this number lacks, and count them as sent."""
        if session != self._session:
            self._session, self._sent = session, 0
        begin = self.end - len(self.rows)
        first = max(self._sent, begin)
        self._sent = self.end
        return FeatureRows(first, list(islice(self.rows, first - begin, None)), session) if first < self.end else None


class Read(NamedTuple):
    """Rows of a step that belong to one text: their first position, and their places among the fused rows."""

    session: VerifierSession
    first: int
    places: Sequence[range]


class FeatureSource(StateReader[KeptRows]):
    """The features of a verifier's texts. `layers`: the target's layers that they come from, in order; `window`: rows
    kept of a text, as far as `MAX_WINDOW_BYTES` permits; `fingerprint`: of the fusion."""

    failure = "features_failed"

    def __init__(self, fusion: Fusion, layers: Sequence[int], fingerprint: str, window: int) -> None:
        super().__init__()
        self.fingerprint = fingerprint
        self._fusion = fusion
        self._layers = tuple(layers)
        self._window = max(1, min(window, MAX_WINDOW_BYTES // (2 * fusion.width)))

    def launch_of(self, engine: Engine) -> Launch:
        return launch_of(engine, features=self._layers)

    def propose(self, step: ComingStep) -> ProposalStats:
        return NO_PROPOSALS

    def unsent(self, session: VerifierSession) -> FeatureRows | None:
        """Return the features that the session's draft lacks, and count them as sent; None if there are none, or no
        draft asks for them."""
        text, number = self._texts.get(session), session.policy.features_session
        return None if text is None or not number else text.unsent(number)

    def observe(self, verifications: Sequence[TreeVerification], logits: StepLogits) -> None:
        """Keep the rows that a step commits."""
        with self._failing_alone():
            read_from = self._continuing(verifications)
            wanted = [row for verification in read_from for row in verification.rows]
            others, read, place = list[int](), list[Read](), 0
            for verification in read_from:
                session, count = verification.session, len(verification.result.tokens)
                end = session.tree.base + count
                first, before = rows_before_root(session, verification.planned, self._window, end)
                begin = len(wanted) + len(others)  # the rows of `wanted` come first
                places = range(begin, begin + len(before)), range(place, place + count)
                read.append(Read(session, first, places))
                others += before
                place += len(verification.rows)
            if read:
                self._keep(read, logits, wanted, others)

    def observe_prompts(self, prompts: Prompts, logits: StepLogits) -> None:
        """Keep rows of prompts."""
        with self._failing_alone():
            others, read = list[int](), list[Read]()
            for session, planned in prompts:
                first, places = rows_before_root(session, planned, self._window, session.tree.base)
                if places and self._reads(session):
                    read.append(Read(session, first, (range(len(others), len(others) + len(places)),)))
                    others += places
            if read:
                self._keep(read, logits, [], others)

    def _reads(self, session: VerifierSession) -> bool:
        drafted = session.policy.remote or session in self._texts  # even while it has no draft
        return self.works and session.request.sampler.rule in DRAFTED and drafted

    @torch.inference_mode()
    def _keep(self, read: Sequence[Read], logits: StepLogits, wanted: Sequence[int], others: Sequence[int]) -> None:
        """Fuse a step's rows with logits and its other rows, and add them to their texts."""
        found = logits.features(wanted, others)
        fused = as_bytes(self._fusion(found if isinstance(found, Tensor) else torch.from_numpy(found)))
        size = 2 * self._fusion.width
        for session, first, parts in read:
            if (text := self._texts.get(session)) is None:
                text = self._texts[session] = KeptRows(self._window)
            text.add(first, [fused[size * at : size * (at + 1)] for places in parts for at in places])
