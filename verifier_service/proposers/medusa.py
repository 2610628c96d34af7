"""Medusa heads in the verifier (Cai et al. 2024): candidates from the hidden state that chose a text's last token.

A small pass between two steps guesses all positions of all sessions, in parts of at most MAX_LOGITS logits. The heads
need no KV cache: they read only that hidden state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specdec.decoding.calibration import corrected
from specdec.decoding.candidates import QueriedRow, draft_candidates
from specdec.decoding.draft_logits import DraftLogits
from specdec.decoding.level_tree import GUESSES, MAX_NODES, FixedTree, LevelTrees, likeliest
from specdec.decoding.query import SamplingQuery
from specdec.decoding.step_logits import StepLogits
from specdec.decoding.tree import Paths
from specdec.engine.engine import Engine, Launch, launch_of
from specdec.engine.heads.growth import draft_logits
from specdec.engine.heads.medusa import MedusaHeads
from specdec.engine.heads.medusa_files import MAX_LOGITS
from verifier_service.backend.result import HEADS
from verifier_service.proposers.heads import HeadsProposer, HeadsText, certain
from verifier_service.proposers.proposer import ComingStep
from verifier_service.sessions.session import VerifierSession
from verifier_service.settings.tuning import DEFAULTS, DraftModelTuning
from verifier_service.verification.tree_verification import TreeVerification


class MedusaProposer(HeadsProposer["MedusaText"]):
    """The Medusa heads of a verifier. `tree`: a fixed tree, with ranks below GUESSES and at most one level per head;
    None: the likeliest paths."""

    def __init__(
        self, heads: MedusaHeads, tree: FixedTree | None = None, tuning: DraftModelTuning = DEFAULTS.draft_model
    ) -> None:
        super().__init__(MedusaText, tuning)
        self._heads = heads
        self._count = heads.shape.heads
        self._texts_at_once = max(1, MAX_LOGITS // (self._count * heads.vocabulary))
        self._tree = tree

    def launch_of(self, engine: Engine) -> Launch:
        return launch_of(engine, hidden=True)

    def observe(self, verifications: Sequence[TreeVerification], logits: StepLogits) -> None:
        """Keep the hidden states that chose the last tokens of a step, and learn which guesses were right."""
        served = self._continuing(verifications)
        if not served:
            return
        with self._failing_alone():
            states = logits.hidden([verification.rows[-1] for verification in served])
            for verification, state in zip(served, states, strict=True):
                session, committed = verification.session, verification.result.tokens
                text = self._text_of(session)
                text.learn(session.tree.base, committed)
                text.state, text.length = state, session.tree.base + len(committed)

    def _propose(self, asked: Sequence[tuple[VerifierSession, MedusaText]], step: ComingStep) -> None:
        for first in range(0, len(asked), self._texts_at_once):
            self._propose_at_once(asked[first : first + self._texts_at_once])

    def _propose_at_once(self, asked: Sequence[tuple[VerifierSession, MedusaText]]) -> None:
        rows = [
            QueriedRow(number * self._count + head, text.query(session, head), session.vocabulary)
            for number, (session, text) in enumerate(asked)
            for head in range(self._count)
        ]
        found = draft_candidates(self._logits([text.state for _, text in asked]), rows, GUESSES)
        shifts = [text.calibration.shifts(head) for _, text in asked for head in range(self._count)]
        shape = len(asked), self._count, found.tokens.shape[1]
        tokens, logprobs = found.tokens.reshape(shape), corrected(shifts, found.logprobs).reshape(shape)
        most = max(session.policy.max_candidates for session, _ in asked)
        trees = likeliest(logprobs, min(most, MAX_NODES)) if self._tree is None else self._tree.of(logprobs)
        for number, (session, text) in enumerate(asked):
            text.proposed, text.tokens, text.logprobs = session.tree.base, tokens[number], logprobs[number]
            if session.samples_candidates:
                paths = _chain(tokens[number, :, 0], logprobs[number, :, 0])
            else:
                paths = self._paths(trees, number, tokens[number], logprobs[number])
            text.usefulness.observe_chain(float(np.exp(logprobs[number, :, 0].cumsum()).sum()))
            if paths.tokens:
                session.add_candidates(paths, HEADS)

    @torch.inference_mode()
    def _logits(self, states: Sequence[Any]) -> DraftLogits:
        """Return the heads' logits of n hidden states: row i * heads + j holds head j's logits for state i."""
        weights = self._heads.weights
        if isinstance(states[0], torch.Tensor):
            stacked = torch.stack(list(states))
        else:
            stacked = torch.from_numpy(np.stack(states))
        return draft_logits(self._heads(stacked.to(weights.device)).flatten(0, 1))

    def _paths(self, trees: LevelTrees, number: int, tokens: NDArray[np.int64], logprobs: NDArray[np.float64]) -> Paths:
        """Return a text's tree without improbable nodes."""
        kept = trees.path_logprobs[number] >= math.log(self._tuning.min_probability)
        parents, levels, ranks = trees.parents[number], trees.levels[number], trees.ranks[number]
        if not kept.all():  # no path is likelier than the one above it, so parents are kept with their children
            numbers = np.concatenate([[0], kept.cumsum()])
            parents, levels, ranks = numbers[parents[kept]], levels[kept], ranks[kept]
        return Paths(tokens[levels, ranks].tolist(), parents.tolist(), logprobs[levels, ranks].tolist())


@dataclass
class MedusaText(HeadsText):
    """The proposer's state for one text."""

    state: Any = None  # hidden state [d] that chose the last of `length` tokens
    tokens: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 0), np.int64))  # [heads, GUESSES], or empty
    logprobs: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 0)))

    def query(self, session: VerifierSession, head: int) -> SamplingQuery:
        """Return the query that ranks a head's guesses. The grammar and banned sequences apply to the first position
        only, because later positions follow guesses. The tree drops candidates that the grammar does not permit."""
        if head:
            return SamplingQuery(self.sampler, self.length + head, session.penalty_state)
        ruled_out = self.sampler.ruled_out(session.tree.committed, ())
        return SamplingQuery(
            self.sampler, self.length, session.penalty_state, allowed=session.hint(()), ruled_out=ruled_out
        )

    def learn(self, base: int, committed: Sequence[int]) -> None:
        """Learn from the tokens committed after the first `base` ones, up to and including the first one that was not
        guessed."""
        if self.proposed != base:
            return
        for head, (token, guesses) in enumerate(zip(committed, self.tokens.tolist(), strict=False)):
            known = [logprob for logprob in self.logprobs[head].tolist() if logprob > -math.inf]
            guesses = guesses[: len(known)]  # the rest is padding
            rank = guesses.index(token) if token in guesses else None
            self.calibration.learn(head, rank, known)
            if rank is None:
                return


def _chain(tokens: NDArray[np.int64], logprobs: NDArray[np.float64]) -> Paths:
    """Return the chain of the heads' best guesses, with draft distributions that put all probability on them."""
    count = int((logprobs > -np.inf).cumprod().sum())
    return certain(Paths(tokens[:count].tolist(), range(count), logprobs[:count].tolist()))
