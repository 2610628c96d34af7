"""A session at the local draft model: the part of its text read so far, and the chain of proposals that continues
it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import structlog

from specdec.decoding import rejection
from specdec.decoding.calibration import Calibration, corrected
from specdec.decoding.candidates import QueriedRow, draft_candidates, over
from specdec.decoding.draft_logits import DraftLogits
from specdec.decoding.noise import text_hash
from specdec.decoding.processing import MAX_ABS_LOGIT, Logits
from specdec.decoding.proposal import DraftDistribution
from specdec.decoding.query import SamplingQuery
from specdec.decoding.tree import Paths
from specdec.engine.kv.blocks import BlockTable
from specdec.engine.kv.slots import PoolFullError, Slots
from verifier_service.backend.result import LOCAL_MODEL
from verifier_service.proposers.usefulness import Usefulness
from verifier_service.sessions.session import VerifierSession
from verifier_service.settings.tuning import DraftModelTuning

log = structlog.get_logger()


class PrefixState:
    """The part of a session's text read by a draft model with this `context` and `vocabulary`. The draft reads proposed
    tokens into the slots that they keep if accepted, so it need not read them again."""

    def __init__(
        self,
        session: VerifierSession,
        table: BlockTable,
        context: int,
        vocabulary: int,
        max_depth: int,
        usefulness: Usefulness,
        calibration: Calibration,
    ) -> None:
        self.session = session
        self.usefulness = usefulness
        self.calibration = calibration
        self.table = table
        self.end = min(session.end - 1, context)  # a candidate for the last token saves no step
        self.over = False  # no more proposals
        self.computed = table.shared  # length of the text's prefix in the KV cache
        self.chain: DraftChain | None = None  # at the current length of the text
        self._vocabulary = vocabulary
        self._max_depth = max_depth  # of a chain
        self._length = 0  # of the text at the last `follow`

    @property
    def pending(self) -> int:
        """The number of unread committed tokens."""
        return self.session.tree.base - self.computed

    def follow(self) -> bool:
        """Catch up with the text. Return True if it has grown since the last call and the draft can read it and
        propose."""
        tree, before = self.session.tree, self._length
        if self.over or tree.base == before:
            return False
        self._length = tree.base
        self.over = tree.base >= self.end or self._has_unknown(tree.committed[before:])
        if self.over:
            return False
        if self.chain is not None:  # the chain's logits were finite, so the text read may be published
            committed = tree.committed[before:]
            self.chain.learn(committed)
            self.table.publish(tree.committed, self.computed)
            self.computed += _agreeing(self.chain.computed, committed)
            self.chain = None
        self.computed = min(self.computed, tree.base - 1)  # reread the last token: its logits propose the next
        try:
            self.table.reserve(min(self.end, tree.base + self._max_depth))
        except PoolFullError:
            return False
        return True

    def _has_unknown(self, tokens: Sequence[int]) -> bool:
        """Return True if a token is beyond the draft's vocabulary, which may lack the target's padding tokens."""
        return self._vocabulary < self.session.vocabulary and max(tokens) >= self._vocabulary

    def take(self, most: int) -> tuple[list[int], int, Slots]:
        """Return up to `most` unread tokens, now marked read; the position of the first; and the slots of everything
        read."""
        begin = self.computed
        self.computed = min(begin + most, self.session.tree.base)
        return self.session.tree.committed[begin : self.computed], begin, self.table.slots[: self.computed]


class DraftChain:
    """A chain of the likeliest tokens, each with alternatives as siblings."""

    def __init__(self, prefix: PrefixState, tuning: DraftModelTuning) -> None:
        self.prefix = prefix
        self.tokens: list[int] = []
        self.computed: list[int] = []  # tokens read by the draft
        self.path_logprob = 0.0  # of its last token
        self.expected_accepted = 0.0
        self.ended = False  # complete
        self.broken = False  # the draft's logits are not finite, or an error ended the chain
        self.calibration = prefix.calibration
        self._tuning = tuning
        self._places: list[tuple[list[int], list[float]]] = []  # tokens and logprobs of siblings
        self._rows: list[DraftDistribution] = []  # distributions that the tokens were drawn from (REJECTION)
        prefix.chain = self

    def take(self) -> tuple[int, int, Slots]:
        """Return the last token, now marked read; its position; and the slots of all tokens up to it."""
        position = self._end - 1
        self.computed.append(self.tokens[-1])
        return self.tokens[-1], position, self.prefix.table.slots[: position + 1]

    def row(self, number: int) -> QueriedRow:
        """Return the query about the logits after the last token, which are row `number` of a pass."""
        session, sampler = self.prefix.session, self.prefix.session.request.sampler
        query = SamplingQuery(
            sampler,
            self._end,
            session.penalty_state,
            self.tokens,
            allowed=session.hint(self.tokens),
            ruled_out=sampler.ruled_out(session.tree.committed, self.tokens),
            text_hash=text_hash(session.tree.committed, self.tokens) if session.samples_candidates else 0,
        )
        return QueriedRow(number, query, session.vocabulary)

    def draw(self, row: QueriedRow, logits: Logits) -> None:
        """Add a token drawn from the draft's logits [V] (REJECTION), if they are finite."""
        logits = over(row.vocabulary, logits)
        self.broken = not abs(logits.max()) < MAX_ABS_LOGIT  # also if NaN
        proposal = None if self.broken else rejection.propose(logits, row.query)
        if proposal is None:
            self.ended = True
            return
        self._rows.append(proposal.row)
        acceptance = rejection.acceptance(proposal.row)
        self.add([*proposal.tokens], self.calibration.corrected(len(self.tokens), [math.log(acceptance)]))

    def add(self, tokens: list[int], logprobs: list[float]) -> None:
        """Add the likeliest of these tokens, and the others as its siblings. Logprobs are calibrated and padded with
        -inf."""
        count = len(logprobs) - logprobs.count(-math.inf)
        if not count:
            self.ended = True
            return
        self._places.append((tokens[:count], logprobs[:count]))
        self.tokens.append(tokens[0])
        self.path_logprob += logprobs[0]
        self.expected_accepted += math.exp(self.path_logprob)
        self.prefix.usefulness.observe_token(math.exp(logprobs[0]))
        full = len(self.tokens) == self._tuning.max_depth or self._end >= self.prefix.end
        self.ended = full or tokens[0] in self.prefix.session.request.end_tokens

    def offer(self) -> None:
        """Add candidates above the minimum probability to the session's token tree."""
        least = math.log(self._tuning.min_probability)
        nodes: list[tuple[int, int, float]] = []  # token, parent, logprob
        parent, path_logprob = 0, 0.0
        for tokens, logprobs in self._places:
            likely = [
                (token, parent, logprob)
                for token, logprob in zip(tokens, logprobs, strict=True)
                if path_logprob + logprob >= least
            ]
            if not likely:
                break
            parent, path_logprob = len(nodes) + 1, path_logprob + logprobs[0]
            nodes += likely
        if nodes:
            of_tokens, of_parents, of_logprobs = zip(*nodes, strict=True)
            self.prefix.session.add_candidates(
                Paths(of_tokens, of_parents, of_logprobs, list(enumerate(self._rows))), LOCAL_MODEL
            )

    def learn(self, committed: Sequence[int]) -> None:
        """Update the calibration with the tokens committed since the chain was proposed."""
        for depth, (token, (tokens, logprobs)) in enumerate(zip(committed, self._places, strict=False)):
            taken = tokens.index(token) if token in tokens else None
            self.calibration.learn(depth, taken, logprobs)
            if taken != 0:
                return

    @property
    def _end(self) -> int:
        """The position after the last token."""
        return self.prefix.session.tree.base + len(self.tokens)


def extend(chains: Sequence[DraftChain], logits: DraftLogits, branches: int) -> None:
    """Extend chains by a token, from the draft's logits after their last tokens: row i is for chain i. A token has at
    most `branches` - 1 siblings."""
    sampling = [number for number, chain in enumerate(chains) if chain.prefix.session.samples_candidates]
    whole = dict(zip(sampling, logits.whole(sampling), strict=True)) if sampling else {}
    asked: list[tuple[DraftChain, QueriedRow]] = []
    for number, chain in enumerate(chains):
        with _alone(chain):
            row = chain.row(number)
            if number in whole:
                chain.draw(row, whole[number])
            else:
                asked.append((chain, row))
    if not asked:
        return
    found = draft_candidates(logits, [row for _, row in asked], branches)
    logprobs = corrected([chain.calibration.shifts(len(chain.tokens)) for chain, _ in asked], found.logprobs)
    of_chains = zip(asked, found.tokens.tolist(), logprobs.tolist(), found.sound.tolist(), strict=True)
    for (chain, _), own_tokens, own_logprobs, sound in of_chains:
        with _alone(chain):
            chain.broken = not sound
            chain.add(own_tokens, own_logprobs)


@contextmanager
def _alone(chain: DraftChain) -> Iterator[None]:
    """End a chain on an error, without failing the others."""
    try:
        yield
    except Exception as error:
        log.error("chain_failed", exc_info=error)
        chain.broken = chain.ended = True


def _agreeing(guessed: Sequence[int], committed: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(guessed, committed, strict=False)))
