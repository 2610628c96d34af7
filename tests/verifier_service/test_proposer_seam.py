"""A new proposer is one new file, without changes to the step loop; its tokens equal those of the plain loop."""

from __future__ import annotations

import math
from typing import Any

import pytest

from specdec.decoding.sampling import Sampling
from specdec.decoding.speculation import NO_DRAFTERS, OWN_DRAFTERS
from specdec.decoding.tree import Paths
from specdec.serving.errors import ModelFailureError
from tests.verifier_service.fakes import BAD, FREE, Client, Decided, TextEngine, run, step_loop
from tests.verifier_service.plain_loop import PlainLoop
from verifier_service.backend.request import Policy
from verifier_service.backend.result import NGRAM, Mode
from verifier_service.proposers.proposer import ComingStep, Phase, ProposalStats, Proposer
from verifier_service.sessions.session import VerifierSession

GREEDY = Sampling(banned_tokens=frozenset({BAD}))
WARM = Sampling(temperature=0.9, seed=5, banned_tokens=frozenset({BAD}))
PENALISED = Sampling(temperature=1.0, seed=3, top_k=4, repetition_penalty=1.3, banned_tokens=frozenset({BAD}))


class EveryToken(Proposer):
    """Proposes each of the first tokens of the vocabulary as the next one."""

    def __init__(self, phase: Phase) -> None:
        self.phase = phase
        self.asked = self.sessions = 0
        self.gone: list[VerifierSession] = []
        self.complete: list[VerifierSession] = []

    def propose(self, step: ComingStep) -> ProposalStats:
        tokens = range(8)
        sessions = list(step.proposed_for())
        for session in sessions:
            session.add_candidates(Paths(tokens, [0] * len(tokens), [math.log(0.1)] * len(tokens)), NGRAM)
        self.asked += 1
        self.sessions += len(sessions)
        return ProposalStats(0.0, len(sessions))

    def forget(self, session: VerifierSession) -> None:
        self.gone.append(session)

    def finished(self, session: VerifierSession) -> None:
        self.complete.append(session)


def texts(loop: Any, **fields: Any) -> list[Client]:
    samplings = (GREEDY, WARM, PENALISED)
    return [Client(loop, [2 + i, 3, 4 + i], 30, sampling=samplings[i % 3], **fields) for i in range(6)]


@pytest.mark.parametrize("phase", list(Phase))
def test_a_proposer_in_a_file_of_its_own_serves_requests(phase: Phase) -> None:
    engine, proposer = TextEngine(40), EveryToken(phase)
    loop = step_loop(engine, FREE, controller=Decided(Mode.NGRAM), proposers=[proposer])
    clients = texts(loop, policy=Policy(OWN_DRAFTERS, 16, 0.0))
    run(loop, *clients)
    assert [client.tokens for client in clients] == [client.want for client in clients]
    assert engine.faults == []
    sources = [source for client in clients for result in client.mail.results for source in result.sources]
    assert sources.count(NGRAM) > 60
    assert proposer.sessions >= proposer.asked > 0
    assert set(proposer.complete) == {client.session for client in clients} == set(proposer.gone)


def test_one_whose_candidates_are_not_wanted_is_not_used() -> None:
    proposer = EveryToken(Phase.BEFORE_DELAY)
    loop = step_loop(TextEngine(40), FREE, controller=Decided(Mode.NGRAM), proposers=[proposer])
    run(loop, *texts(loop, policy=Policy(NO_DRAFTERS, 16, 0.0)))
    assert proposer.sessions == 0


def test_the_plain_loop_and_the_step_loop_say_the_same() -> None:
    plain, drafted = (
        PlainLoop(TextEngine(40)),
        step_loop(TextEngine(40), FREE, proposers=[EveryToken(Phase.AFTER_DELAY)]),
    )
    want, got = texts(plain, top_logprobs=2), texts(drafted, top_logprobs=2, policy=Policy(OWN_DRAFTERS, 16, 0.0))
    run(plain, *want)
    run(drafted, *got)
    assert [client.tokens for client in got] == [client.tokens for client in want]
    assert [client.logprobs for client in got] == [client.logprobs for client in want]
    assert plain.pool.held == drafted.pool.held == 0
    assert plain.stats.committed == drafted.stats.committed
    assert plain.stats.steps == 30  # one per token of the longest text
    assert drafted.stats.steps < plain.stats.steps


def test_the_plain_loop_ends_a_session_whose_logits_are_broken() -> None:
    loop = PlainLoop(TextEngine(40))
    broken, sound = Client(loop, [2, BAD, 3], 5, sampling=GREEDY), Client(loop, [2, 3], 5, sampling=GREEDY)
    run(loop, broken, sound)
    assert isinstance(broken.mail.error, FloatingPointError)
    assert sound.tokens == sound.want


def test_the_plain_loop_ends_only_the_session_whose_text_fails() -> None:
    engine = TextEngine(40)
    engine.poison = BAD
    loop = PlainLoop(engine)
    poisoned, sound = Client(loop, [2, BAD, 3], 5, sampling=GREEDY), Client(loop, [2, 3], 5, sampling=GREEDY)
    run(loop, poisoned, sound)
    assert isinstance(poisoned.mail.error, ModelFailureError)
    assert sound.tokens == sound.want
