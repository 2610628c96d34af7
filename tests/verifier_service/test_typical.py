"""The TYPICAL rule in the step loop: each token is the target's own choice, or typical of the target."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from specdec.decoding.choice import choose
from specdec.decoding.lookahead import Lookahead
from specdec.decoding.processing import adjusted
from specdec.decoding.query import PenaltyState, RequestSampler, SamplingQuery
from specdec.decoding.sampling import Rule, Sampling
from specdec.decoding.speculation import CandidateSource
from tests.verifier_service.fake_heads import KINDS, check_empty, sources
from tests.verifier_service.fakes import BAD, END, LANGUAGE, VOCABULARY, Client, run
from tests.verifier_service.test_heads_proposers import client
from verifier_service.backend.request import Policy
from verifier_service.backend.result import BONUS, CORRECTION, HEADS, LOOKAHEAD, PLAIN

HOT = Sampling(temperature=1.0, seed=3, banned_tokens=frozenset({BAD}))
PENALISED = replace(HOT, repetition_penalty=1.5, frequency_penalty=0.5)


def explained(one: Client) -> tuple[int, int]:
    """Check each token of a text by the rule's definition. Return the number of accepted tokens that the target would
    not have chosen, and of all accepted tokens."""
    request = one.session.request
    coupled = RequestSampler(request.sampler.sampling, request.sampler.end_tokens)
    penalties = PenaltyState(VOCABULARY, request.prompt, [])
    number, position = LANGUAGE.number_of(request.prompt), len(request.prompt)
    others = accepted = 0
    for token, source in zip(one.tokens, sources(one), strict=True):
        query = SamplingQuery(coupled, position, penalties)
        row = LANGUAGE.logits(number)
        (own,) = choose(row[None], [query]).tolist()
        if source in (BONUS, CORRECTION, PLAIN):
            assert token == own
        else:
            accepted += 1
            z = adjusted(row[None], [query])[0].astype(np.float64) / request.sampler.sampling.temperature
            weights = np.exp(z - z.max())
            p = weights / weights.sum()
            entropy = -sum(x * math.log(x) for x in p if x > 0)
            if token != own:
                others += 1
                assert p[token] > min(0.09, 0.3 * math.exp(-entropy))
        number, position = LANGUAGE.number(number, token), position + 1
        penalties.extend([token])
    return others, accepted


@pytest.mark.parametrize(
    "sampling",
    [pytest.param(PENALISED, id="penalised"), pytest.param(HOT, id="plain", marks=pytest.mark.verify)],
)
@pytest.mark.parametrize(
    "name", ["medusa", "eagle3", *(pytest.param(name, marks=pytest.mark.verify) for name in ("block", "markov"))]
)
def test_every_token_is_chosen_or_typical(name: str, sampling: Sampling) -> None:
    kind = KINDS[name]
    loop = kind.loop(kind.heads(0.3))
    texts = [client(loop, 5, seed, sampling=sampling, rule=Rule.TYPICAL, max_tokens=80) for seed in range(4)]
    run(loop, *texts)
    check_empty(loop)
    others, accepted = np.sum([explained(one) for one in texts], axis=0)
    assert 0 < others < accepted
    assert {len(one.tokens) for one in texts} == {80}


def test_it_takes_fewer_steps_than_the_exact_rule() -> None:
    kind, steps = KINDS["eagle3"], {}
    for rule in (Rule.COUPLED, Rule.TYPICAL):
        loop = kind.loop(kind.heads(0.3))
        texts = [client(loop, 5, seed, sampling=HOT, rule=rule, max_tokens=80) for seed in range(4)]
        run(loop, *texts)
        steps[rule] = loop.stats.steps
    assert steps[Rule.TYPICAL] < steps[Rule.COUPLED]


def test_without_candidates_tokens_are_those_of_plain_decoding() -> None:
    kind = KINDS["medusa"]
    loop = kind.loop(kind.heads())
    one = client(loop, sampling=HOT, rule=Rule.TYPICAL, policy=Policy(frozenset(), 8, 0.0))
    run(loop, one)
    assert one.tokens == one.want


def test_a_text_ends_at_an_accepted_end_token() -> None:
    kind = KINDS["eagle3"]
    loop = kind.loop(kind.heads(0.3))
    texts = [
        client(
            loop,
            5,
            seed,
            sampling=replace(HOT, seed=seed),
            rule=Rule.TYPICAL,
            max_tokens=200,
            end_tokens=frozenset({END}),
        )
        for seed in range(8)
    ]
    run(loop, *texts)
    check_empty(loop)
    ended = [one for one in texts if one.tokens[-1] == END]
    assert any(sources(one)[-1] == HEADS for one in ended)
    assert all(END not in one.tokens[:-1] for one in texts)


def test_log_probabilities_are_those_of_the_rows_that_chose() -> None:
    kind = KINDS["eagle3"]
    loop = kind.loop(kind.heads(0.3))
    one = client(loop, sampling=HOT, rule=Rule.TYPICAL, max_tokens=40, top_logprobs=1, rejected_candidates=True)
    run(loop, one)
    number = LANGUAGE.number_of(one.session.request.prompt)
    for token, found in zip(one.tokens, one.logprobs, strict=True):
        row = LANGUAGE.logits(number).astype(np.float64)
        assert found.chosen == pytest.approx(row[token] - math.log(np.exp(row).sum()), abs=1e-4)
        number = LANGUAGE.number(number, token)


def test_windows_guess_with_the_noise_of_the_text() -> None:
    """Jacobi decoding: a window's guesses become the target's own choices."""
    loop = KINDS["medusa"].loop(KINDS["medusa"].heads(1.0))
    policy = Policy(frozenset({CandidateSource.LOOKAHEAD}), 32, 0.0, lookahead=Lookahead(8, 2, 4))
    one = client(loop, sampling=HOT, rule=Rule.TYPICAL, policy=policy, max_tokens=80)
    run(loop, one)
    explained(one)
    assert sources(one).count(LOOKAHEAD) > 0
