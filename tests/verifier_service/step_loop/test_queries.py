"""With partial distributions and queries, sessions that need a draft (CONTRASTIVE) get the same tokens as with whole
distributions, even beside other sessions, and no slot is wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from specdec.decoding import contrastive
from specdec.decoding.choice import choose
from specdec.decoding.contrastive import DraftQuery
from specdec.decoding.proposal import DraftDistribution, Proposal
from specdec.decoding.query import RequestSampler, SamplingQuery
from specdec.decoding.sampling import Contrast, Rule
from specdec.decoding.tree import Paths
from testing.mailbox import Mailbox
from tests.verifier_service.fakes import LANGUAGE, VOCABULARY, TextEngine, step_loop
from tests.verifier_service.step_loop.helpers import NO_BAD, REMOTE, client, text
from verifier_service.backend.request import Policy, VerifierSessionRequest
from verifier_service.backend.result import REMOTE_DRAFT
from verifier_service.sessions.running_session import RunningSession
from verifier_service.sessions.session import VerifierSession
from verifier_service.step_loop import StepLoop

TOKENS = 40


class Mail(Mailbox):
    """Keeps queries too, each with the length of the committed text when it was sent."""

    def __init__(self, prompt: int) -> None:
        super().__init__()
        self._prompt = prompt
        self.queries: list[tuple[int, DraftQuery]] = []

    def _append(self, item: Any) -> None:
        if isinstance(item, DraftQuery):
            self.queries.append((self._prompt + sum(len(result.tokens) for result in self.results), item))
        else:
            super()._append(item)


class Contrasted:
    """A session of a step loop, and its draft, which sends random parts of its distributions."""

    def __init__(self, loop: StepLoop, seed: int, contrast: Contrast) -> None:
        self.sampler = RequestSampler(NO_BAD, rule=Rule.CONTRASTIVE, contrast=contrast)
        self.random = np.random.default_rng(seed)
        prompt = text(5, seed)
        request = VerifierSessionRequest(prompt, [], self.sampler, frozenset(), TOKENS, None, loop.context)
        self.session = VerifierSession(request, Policy(REMOTE, 8, 0.0), 64, VOCABULARY)
        self.mail = Mail(len(prompt))
        self.answered = 0  # number of queries
        self.want = list(prompt)
        for _ in range(TOKENS):
            self.want.append(self.choice(self.want))
        loop.enqueue(RunningSession(self.session, self.mail))

    def choice(self, known: list[int]) -> int:
        z = LANGUAGE.logits(LANGUAGE.number_of(known))
        query = SamplingQuery(self.sampler, len(known), proposal=Proposal((), self.whole(known)))
        return int(choose(z[None], [query])[0])

    def whole(self, known: list[int]) -> DraftDistribution:
        """Return the draft's distribution after a text."""
        logits: NDArray[np.float32] = LANGUAGE.logits(LANGUAGE.number_of([*known, 0]))
        return contrastive.amateur_distribution(logits, self.sampler.contrast)

    def part(self, known: list[int]) -> DraftDistribution:
        count = int(self.random.integers(1, VOCABULARY + 1))
        return contrastive.answer(self.whole(known), np.sort(self.random.permutation(VOCABULARY)[:count]))

    def draft(self) -> None:
        """Answer a query, or send a chain of candidates, most of them right, each with a part of its distribution."""
        if self.mail.finish:
            return
        known = list(self.session.tree.committed)
        if self.answered < len(self.mail.queries):
            ((_, query),) = self.mail.queries[self.answered :]
            self.answered += 1
            assert query.base == len(known)
            rows = [(0, contrastive.answer(self.whole(known), query.ids))]
            self.session.extend(query.base, Paths([], [], [], rows), 0.0)
            return
        rows, tokens = [(0, self.part(known))], list[int]()
        for number in range(1, int(self.random.integers(1, 5))):
            right = self.random.random() < 0.8
            tokens.append(self.choice(known) if right else int(self.random.integers(2, VOCABULARY - 1)))
            known.append(tokens[-1])
            rows.append((number, self.part(known)))
        self.session.extend(
            len(self.session.tree.committed), Paths(tokens, range(len(tokens)), [-0.1] * len(tokens), rows), 0.0
        )


@pytest.mark.parametrize("contrast", [Contrast(), Contrast(0.01, 2.0)], ids=str)
def test_partial_distributions_change_no_token_and_no_slot(contrast: Contrast) -> None:
    engine = TextEngine(40)
    loop = step_loop(engine)
    sessions = [Contrasted(loop, seed, contrast) for seed in range(3)]
    beside = client(loop, seed=9, max_tokens=60)
    for _ in range(1000):
        for own in sessions:
            own.draft()
        beside.read()
        loop.turn()
        if beside.over and all(own.mail.finish for own in sessions):
            break
    for own in sessions:
        assert own.mail.error is None
        assert [token for result in own.mail.results for token in result.tokens] == own.want[5:]
        assert own.mail.queries
        assert all(committed == query.base for committed, query in own.mail.queries)
        assert len({query.base for _, query in own.mail.queries}) == len(own.mail.queries)  # never two about one text
        # With the small alpha, most tokens are plausible: distributions sent ahead decide hardly any row.
        assert sum(result.accepted for result in own.mail.results) or contrast.alpha < 0.1
        for result in own.mail.results:  # as the orchestrator checks
            ends_with_candidate = bool(result.finish) and result.sources[-1] == REMOTE_DRAFT
            assert len(result.tokens) == result.accepted + result.steps - ends_with_candidate
    assert beside.tokens == beside.want
    assert engine.faults == []
    assert loop.pool.held == 0
