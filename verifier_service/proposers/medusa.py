"""Medusa heads in the verifier (Cai et al. 2024): candidates from the hidden state that chose a text's last token.

One small pass between two steps gives the guesses of all sessions for all positions, so nothing is read twice and
nothing kept but a hidden state. Under COUPLED a position's guesses are ranked with the noise of that position, and are
what the target would choose if the heads' logits were its own. Under REJECTION a candidate is certain to be drawn, and
there is one at each position.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import structlog
import torch
from numpy.typing import NDArray

from specdec.decoding.calibration import Calibration, Calibrations, corrected
from specdec.decoding.candidates import AskedRow, draft_candidates
from specdec.decoding.draft_logits import DraftLogits, HostDraftLogits
from specdec.decoding.level_tree import GUESSES, MAX_NODES, FixedTree, LevelTrees, likeliest
from specdec.decoding.proposal import DraftDistribution
from specdec.decoding.query import RequestSampler, SamplingQuery
from specdec.decoding.speculation import CandidateSource
from specdec.decoding.step_logits import StepLogits
from specdec.decoding.tree import Paths
from specdec.engine.heads.medusa import MedusaHeads
from specdec.engine.heads.medusa_files import MAX_LOGITS
from verifier_service.backend.result import HEADS
from verifier_service.proposers.proposer import NO_PROPOSALS, ComingStep, Phase, ProposalStats, Proposer
from verifier_service.proposers.usefulness import Usefulness
from verifier_service.sessions.session import VerifierSession
from verifier_service.settings.tuning import DEFAULTS, DraftModelTuning
from verifier_service.verification.tree_verification import TreeVerification

log = structlog.get_logger()


class MedusaProposer(Proposer):
    """The Medusa heads of a verifier, owned by the step loop's thread. A failure costs no token: the heads are not used
    again. `tree`: its ranks are below GUESSES, its depth at most the number of heads; None: the likeliest paths."""

    phase = Phase.AFTER_DELAY
    drafter = CandidateSource.HEADS

    def __init__(
        self, heads: MedusaHeads, tree: FixedTree | None = None, tuning: DraftModelTuning = DEFAULTS.draft_model
    ) -> None:
        self.works = True
        self._heads = heads
        self._count = heads.shape.heads
        self._texts_at_once = max(1, MAX_LOGITS // (self._count * heads.vocabulary))
        self._tree = tree
        self._tuning = tuning
        self._texts: dict[VerifierSession, _HeadText] = {}
        self._calibrations = Calibrations()

    def serves(self, session: VerifierSession) -> bool:
        """Return True if it may propose candidates for a session, now or later."""
        return self.works

    def observe(self, verifications: Sequence[TreeVerification], logits: StepLogits) -> None:
        """Keep the hidden states that chose the last tokens of a step, and learn which guesses were right."""
        served = [
            verification
            for verification in verifications
            if verification.error is None
            and not verification.result.finish
            and self.drafter in verification.session.policy.drafters
            and verification.session.takes_own_candidates
        ]
        if not served or not self.works:
            return
        with self._failing_alone():
            states = logits.hidden([verification.rows[-1] for verification in served])
            for verification, state in zip(served, states, strict=True):
                session, committed = verification.session, verification.result.tokens
                text = self._text_of(session)
                text.learn(session.tree.base, committed)
                text.state, text.length = state, session.tree.base + len(committed)

    def propose(self, step: ComingStep) -> ProposalStats:
        begin = time.monotonic()
        asked = [
            (session, text)
            for session in step.decoding
            if step.eligibility.uses_local_model(session)
            and (text := self._texts.get(session)) is not None
            and text.length == session.tree.base
            and text.proposed != session.tree.base
            and session.best_nodes.expected - 1.0 < text.usefulness.expected_accepted
        ]
        with self._failing_alone():
            for first in range(0, len(asked), self._texts_at_once):
                self._propose(asked[first : first + self._texts_at_once])
        return ProposalStats(time.monotonic() - begin, len(asked)) if asked else NO_PROPOSALS

    def forget(self, session: VerifierSession) -> None:
        self._texts.pop(session, None)

    @contextmanager
    def _failing_alone(self) -> Iterator[None]:
        """Turn the heads off on an error, without failing the step."""
        try:
            yield
        except Exception as error:
            log.error("heads_failed", exc_info=error)
            self.works = False
            self._texts.clear()

    def _text_of(self, session: VerifierSession) -> _HeadText:
        text = self._texts.get(session)
        if text is None:
            request = session.request
            text = self._texts[session] = _HeadText(
                _greedy(request.sampler) if session.samples_candidates else request.sampler,
                self._calibrations.of(request.sampler, request.tenant),
                Usefulness(self._tuning),
            )
        return text

    def _propose(self, asked: Sequence[tuple[VerifierSession, _HeadText]]) -> None:
        rows = [
            AskedRow(number * self._count + head, text.query(session, head), session.vocabulary)
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
        """Return the heads' logits of n hidden states: row i * heads + j is head j's for state i."""
        weights = self._heads.weights
        if isinstance(states[0], torch.Tensor):
            stacked = torch.stack(list(states))
        else:
            stacked = torch.from_numpy(np.stack(states))
        logits = self._heads(stacked.to(weights.device)).flatten(0, 1)
        if logits.device.type == "cpu":
            return HostDraftLogits(logits.numpy())
        from specdec.engine.gpu.draft_logits import GpuDraftLogits  # imports Triton's neighbours

        return GpuDraftLogits(logits)

    def _paths(self, trees: LevelTrees, number: int, tokens: NDArray[np.int64], logprobs: NDArray[np.float64]) -> Paths:
        """Return a text's tree without improbable nodes."""
        kept = trees.path_logprobs[number] >= math.log(self._tuning.min_probability)
        parents, levels, ranks = trees.parents[number], trees.levels[number], trees.ranks[number]
        if not kept.all():  # no path is likelier than the one above it, so parents are kept with their children
            numbers = np.concatenate([[0], kept.cumsum()])
            parents, levels, ranks = numbers[parents[kept]], levels[kept], ranks[kept]
        return Paths(tokens[levels, ranks].tolist(), parents.tolist(), logprobs[levels, ranks].tolist())


@dataclass
class _HeadText:
    """A text's part in the proposer."""

    sampler: RequestSampler  # of the queries that rank guesses
    calibration: Calibration
    usefulness: Usefulness
    state: Any = None  # hidden state [d] that chose the last of `length` tokens
    length: int = 0
    proposed: int = 0  # length of the text at the last proposal
    tokens: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 0), np.int64))  # [heads, GUESSES], then
    logprobs: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 0)))

    def query(self, session: VerifierSession, head: int) -> SamplingQuery:
        """Return the query that ranks a head's guesses. Grammar and bans of sequences count for the first position
        only, since what stands before the others is a guess too: the tree refuses what the grammar does not permit."""
        if head:
            return SamplingQuery(self.sampler, self.length + head, session.penalty_state)
        ruled_out = self.sampler.ruled_out(session.tree.committed, ())
        return SamplingQuery(
            self.sampler, self.length, session.penalty_state, allowed=session.hint(()), ruled_out=ruled_out
        )

    def learn(self, base: int, committed: Sequence[int]) -> None:
        """Learn from the tokens committed after the first `base` ones, down to the first that was no guess."""
        if self.proposed != base:
            return
        for head, (token, guesses) in enumerate(zip(committed, self.tokens.tolist(), strict=False)):
            rank = guesses.index(token) if token in guesses else None
            known = [logprob for logprob in self.logprobs[head].tolist() if logprob > -math.inf]
            self.calibration.learn(head, rank, known)
            if rank is None:
                return


def _chain(tokens: NDArray[np.int64], logprobs: NDArray[np.float64]) -> Paths:
    """Return the best guess of each head, one below the other, each certain to be drawn."""
    count = int((logprobs > -np.inf).cumprod().sum())
    chosen = tokens[:count].tolist()
    rows = [(place, DraftDistribution.certain(token)) for place, token in enumerate(chosen)]
    return Paths(chosen, range(count), logprobs[:count].tolist(), rows)


def _greedy(sampler: RequestSampler) -> RequestSampler:
    """Return the sampler that ranks by the logits alone."""
    return replace(sampler, sampling=replace(sampler.sampling, temperature=0.0))
