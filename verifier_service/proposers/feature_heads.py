"""Heads that read features of the target's layers: the verifier's part of EAGLE-3, block drafts and MTP layers.

The heads read every committed row once, with the target's features: prompts as they are computed, then the root and the
accepted candidates. They keep the keys and values of these rows. Between two steps they grow a tree for each text, one
level at a time while another level pays; the tree's keys and values are not kept.

Features exist only for rows that the target computes while the heads may propose for the text. Rows found in the prefix
cache, or computed under another policy, have none. The heads then read the text from the first row after the gap: they
guess from less context, but no token depends on it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.decoding.calibration import Calibration, corrected
from specdec.decoding.candidates import QueriedRow, draft_candidates, with_confidence
from specdec.decoding.level_tree import MAX_NODES, GrowingTrees
from specdec.decoding.query import RequestSampler, SamplingQuery
from specdec.decoding.step_logits import StepLogits
from specdec.decoding.tree import Paths
from specdec.engine.engine import Engine, Launch, launch_of
from specdec.engine.heads.growth import BEAM, HeadsReader, Level, TreeAnchor
from specdec.engine.heads.text_memory import TextSlots
from specdec.engine.kv.slots import PoolFullError, Slots
from verifier_service.backend.result import HEADS
from verifier_service.proposers.heads import HeadsProposer, HeadsText, certain
from verifier_service.proposers.proposer import ComingStep
from verifier_service.proposers.state_reader import rows_before_root
from verifier_service.proposers.usefulness import Usefulness
from verifier_service.sessions.session import VerifierSession
from verifier_service.settings.tuning import DEFAULTS, DraftModelTuning
from verifier_service.verification.tree_verification import Prompts, TreeVerification

LEVEL_SMOOTHING = 0.1
"""Weight of the latest level in the moving average of a level's seconds."""


Asked = Sequence[tuple[VerifierSession, "FeatureText"]]


class FeatureHeadsProposer(HeadsProposer["FeatureText"]):
    """Heads of a verifier that read features of `layers`, in this order. While the heads' memory has no room for a
    text, the text gets no guesses."""

    def __init__(
        self, reader: HeadsReader, layers: Sequence[int], tuning: DraftModelTuning = DEFAULTS.draft_model
    ) -> None:
        def new_text(sampler: RequestSampler, calibration: Calibration, usefulness: Usefulness) -> FeatureText:
            return FeatureText(sampler, calibration, usefulness, slots=TextSlots(reader.memory))

        super().__init__(new_text, tuning)
        self._reader = reader
        self._layers = tuple(layers)
        self._level_seconds = 0.0  # of one level, moving average; 0: not known

    def launch_of(self, engine: Engine) -> Launch:
        return launch_of(engine, features=self._layers)

    def forget(self, session: VerifierSession) -> None:
        text = self._texts.pop(session, None)
        if text is not None:
            text.slots.release()

    # --- reading committed rows ---------------------------------------------------------------------

    def observe(self, verifications: Sequence[TreeVerification], logits: StepLogits) -> None:
        """Read the rows that a step commits, and learn which guesses were right."""
        continuing = self._continuing(verifications)
        if not continuing:
            return
        with self._failing_alone():
            wanted, others, read = Rows(), Rows(), list[tuple[FeatureText, int, int]]()
            for verification in continuing:
                session, committed = verification.session, verification.result.tokens
                text, base = self._text_of(session), session.tree.base
                text.learn(base, committed)
                # The context ends with the committed text.
                first, before = rows_before_root(session, verification.planned, self._reader.context, base)
                slots = text.take(first, len(before) + len(committed))
                if slots is None:
                    continue
                others.add(before, session.tree.committed[first + 1 :], first, slots[: len(before)])
                wanted.add(verification.rows, committed, base - 1, slots[len(before) :])
                read.append((text, len(wanted.places) - 1, base + len(committed)))
            if read:
                states = self._read(wanted, others, logits)[[last for _, last, _ in read]]
                for (text, _, length), state in zip(read, states, strict=True):
                    text.state, text.length = state, length

    def observe_prompts(self, prompts: Prompts, logits: StepLogits) -> None:
        """Read rows of prompts."""
        with self._failing_alone():
            rows = Rows()
            for session, planned in prompts:
                first, places = rows_before_root(session, planned, self._reader.context, session.tree.base)
                if not places or not self._reads(session):
                    continue
                slots = self._text_of(session).take(first, len(places))
                if slots is not None:
                    rows.add(places, session.tree.committed[first + 1 : first + 1 + len(places)], first, slots)
            if rows.places:
                self._read(Rows(), rows, logits)

    @torch.inference_mode()
    def _read(self, wanted: Rows, others: Rows, logits: StepLogits) -> Tensor:
        """Read a step's rows with logits, and other rows. Return their fused features [n, d'], in this order."""
        found = logits.features(wanted.places, others.places)
        fused = self._reader.heads.fused(found if isinstance(found, Tensor) else torch.from_numpy(found))
        rows = wanted + others
        self._reader.keep(rows.tokens, rows.positions, fused, np.concatenate(rows.slots))
        return fused

    # --- growing trees ------------------------------------------------------------------------------

    def _propose(self, asked: Asked, step: ComingStep) -> None:
        begin = time.monotonic()
        for group in self._groups([pair for pair in asked if self._levels(pair[0]) > 0]):
            trees = self._grown(group, step, begin)
            most = min(MAX_NODES, max(session.policy.max_candidates for session, _ in group))
            nodes, best = trees.nodes, trees.best(most)
            for number, (session, text) in enumerate(group):
                text.proposed = session.tree.base
                text.tokens, text.parents, text.logprobs = (
                    part[number] for part in (nodes.tokens, nodes.parents, nodes.logprobs)
                )
                count = int((best.path_logprobs[number] > -np.inf).sum())
                text.usefulness.observe_chain(float(np.exp(best.path_logprobs[number, :count]).sum()))
                paths = Paths(*(part[number, :count].tolist() for part in (best.tokens, best.parents, best.logprobs)))
                if count:
                    session.add_candidates(certain(paths) if session.samples_candidates else paths, HEADS)

    def _groups(self, asked: Asked) -> Iterator[Asked]:
        """Yield groups of texts of similar length, whose trees grow together, within the limits on logits and gathered
        rows."""
        group, reader = list[tuple[VerifierSession, FeatureText]](), self._reader
        for pair in sorted(asked, key=lambda pair: pair[1].slots.count):
            rows = (len(group) + 1) * min(reader.context, pair[1].slots.count)
            if group and (len(group) == reader.texts_at_once or rows > reader.rows_at_once):
                yield group
                group = []
            group.append(pair)
        if group:
            yield group

    @torch.inference_mode()
    def _grown(self, group: Asked, step: ComingStep, begin: float) -> GrowingTrees:
        """Grow trees while another level pays. `begin`: start of the work before the step."""
        texts = [text for _, text in group]
        limits = np.array([self._levels(session) for session, _ in group])
        trees = GrowingTrees(len(group), BEAM, math.log(self._tuning.min_probability))
        paths: list[list[list[int]]] = [[[]] for _ in group]
        growth = self._reader.growth([self._anchor(*pair) for pair in group], int(limits.max()))
        tokens, origins = np.array([[session.tree.committed[-1]] for session, _ in group]), trees.origins
        for level in range(int(limits.max())):
            started = time.monotonic()
            found = growth.level(self._reader.tensor(tokens), self._reader.tensor(origins))
            guesses, logprobs = self._guesses(group, trees, paths, found)
            logprobs[limits <= level] = -np.inf
            for text, first in zip(texts, logprobs[:, 0], strict=True):
                if first[0] > -np.inf:
                    text.usefulness.observe_token(min(1.0, float(np.exp(first).sum())))
            trees.grow(guesses, logprobs)
            if level:  # the first level also waits for the work launched before it
                seconds = time.monotonic() - started
                known = self._level_seconds
                self._level_seconds += LEVEL_SMOOTHING * (seconds - known) if known else seconds
            if level + 1 == limits.max() or not self._pays(texts, trees, step, begin):
                break
            paths = [
                [own[origin] + [token] for origin, token in zip(*pairs, strict=True)]
                for own, *pairs in zip(paths, trees.origins.tolist(), trees.tokens.tolist(), strict=True)
            ]
            tokens, origins = trees.tokens, trees.origins
        return trees

    def _guesses(
        self, group: Asked, trees: GrowingTrees, paths: list[list[list[int]]], level: Level
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the tokens and log-probabilities [n, f, BEAM] of the children of each text's f frontier nodes; -inf:
        no child. `paths`: each frontier node's tokens below the root."""
        shape = *trees.tokens.shape, BEAM
        tokens, logprobs = np.zeros(shape, dtype=np.int64), np.full(shape, -np.inf)
        rows, shifts, places = list[QueriedRow](), list[Sequence[float]](), list[tuple[int, int]]()
        own = level.logits.shape[1]  # rows of logits of a text
        for number, (session, text) in enumerate(group):
            for place, path in enumerate(paths[number]):
                if trees.path_logprobs[number, place] > -np.inf:
                    query = text.query(session, path)
                    rows.append(QueriedRow(number * own + min(place, own - 1), query, session.vocabulary))
                    shifts.append(text.calibration.shifts(len(path)))
                    places.append((number, place))
        found = draft_candidates(self._reader.draft_logits(level.logits), rows, BEAM)
        of_texts, of_places = np.array(places).T
        if level.confidence is not None:
            found = with_confidence(found, level.confidence[of_texts, of_places])
        tokens[of_texts, of_places] = found.tokens
        logprobs[of_texts, of_places] = corrected(shifts, found.logprobs)
        for number, (session, _) in enumerate(group):
            if session.samples_candidates:
                logprobs[number, :, 1:] = -np.inf
        return tokens, logprobs

    def _pays(self, texts: Sequence[FeatureText], trees: GrowingTrees, step: ComingStep, begin: float) -> bool:
        """Return whether another level adds more tokens than the step would bring in the same time."""
        frontier = np.exp(trees.path_logprobs)
        acceptance = np.array([[text.usefulness.next_token_acceptance] for text in texts])
        gain = float(np.maximum(frontier * acceptance - step.break_even, 0.0).sum())
        probabilities = np.exp(trees.nodes.path_logprobs)
        verified = probabilities[probabilities > step.break_even]
        decoding = len(step.decoding)
        rate = (decoding + verified.sum()) / (step.latency.of(decoding + len(verified)) + time.monotonic() - begin)
        return gain > float(rate) * self._level_seconds

    def _levels(self, session: VerifierSession) -> int:
        """Return the maximum levels of a text's tree. A candidate for its last token would save no step."""
        depth = self._reader.depth
        return min(depth, session.policy.max_depth or depth, session.end - 1 - session.tree.base)

    def _anchor(self, session: VerifierSession, text: FeatureText) -> TreeAnchor:
        tree = session.tree
        return TreeAnchor(tree.committed[-1], tree.base, text.slots.last(self._reader.context), text.state)


@dataclass
class FeatureText(HeadsText):
    """The proposer's state for one text."""

    slots: TextSlots = field(kw_only=True)
    state: Any = None  # fused features [d'] of the row before the last token; None: none yet
    tokens: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))  # [nodes] of the last tree
    parents: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    logprobs: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))

    def take(self, position: int, count: int) -> Slots | None:
        """Return the slots of `count` rows starting at `position`; None, with all of the text's slots released, if
        memory is short."""
        try:
            return self.slots.take(position, count)
        except PoolFullError:
            return None

    def query(self, session: VerifierSession, path: list[int]) -> SamplingQuery:
        """Return the query that ranks the children of a node."""
        return SamplingQuery(
            self.sampler,
            session.tree.base + len(path),
            session.penalty_state,
            path,
            allowed=session.hint(path),
            ruled_out=self.sampler.ruled_out(session.tree.committed, path),
        )

    def learn(self, base: int, committed: Sequence[int]) -> None:
        """Learn from the tokens committed after the first `base` ones, up to and including the first one that was not
        guessed."""
        if self.proposed != base:
            return
        node = 0  # the root
        for depth, token in enumerate(committed):
            (own,) = np.nonzero((self.parents == node) & (self.logprobs > -np.inf))
            if not len(own):
                return
            guesses = self.tokens[own].tolist()
            rank = guesses.index(token) if token in guesses else None
            self.calibration.learn(depth, rank, self.logprobs[own].tolist())
            if rank is None:
                return
            node = int(own[rank]) + 1


class Rows:
    """Rows of a step that heads read."""

    def __init__(self) -> None:
        self.places: list[int] = []
        self.tokens: list[int] = []  # the token after each row
        self.positions: list[int] = []
        self.slots: list[Slots] = []

    def add(self, places: Sequence[int], tokens: Sequence[int], position: int, slots: Slots) -> None:
        """Add consecutive rows of a text, starting at `position`."""
        self.places += places
        self.tokens += tokens
        self.positions += range(position, position + len(places))
        self.slots.append(slots)

    def __add__(self, others: Rows) -> Rows:
        """Return these rows followed by others."""
        joined = Rows()
        joined.places, joined.tokens = self.places + others.places, self.tokens + others.tokens
        joined.positions, joined.slots = self.positions + others.positions, self.slots + others.slots
        return joined
