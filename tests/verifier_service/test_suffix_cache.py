"""Which finished texts are kept, and for which tenant."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from specdec.decoding.lookahead import Lookahead
from specdec.decoding.query import RequestSampler
from specdec.decoding.sampling import Rule, Sampling
from specdec.decoding.speculation import OWN_DRAFTERS, CandidateSource
from specdec.decoding.tree import TokenTree
from tests.verifier_service.fakes import BAD, LANGUAGE, Client, TextEngine, run, step_loop
from verifier_service.backend.request import Policy
from verifier_service.backend.result import LOOKAHEAD, NGRAM
from verifier_service.proposers.lookup import BREAK, MAX_TENANTS, SuffixCache
from verifier_service.sessions.ngram import SessionNgrams

SOUND = Sampling(banned_tokens=frozenset({BAD}))


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=30), max_size=12), st.integers(2, 40))
def test_the_last_tokens_are_kept_in_order(texts: list[list[int]], most: int) -> None:
    shared = SuffixCache(most)
    for text in texts:
        shared.add("a", text)
    said = [token for text in texts for token in [BREAK, *text[-(most - 1) :]]]
    found = shared.tokens_of("a")
    assert (found is None) == (not texts)
    assert found is None or found.tolist() == said[-most:]


def test_tenants_are_apart_and_the_longest_silent_is_forgotten() -> None:
    shared = SuffixCache(8)
    for number in range(MAX_TENANTS):
        shared.add(str(number), [number])
    shared.add("0", [5])
    shared.add("new", [7])
    found = shared.tokens_of("0")
    assert found is not None
    assert found.tolist() == [BREAK, 0, BREAK, 5]
    assert shared.tokens_of("1") is None
    assert shared.tokens_of("2") is not None


def test_nothing_is_kept_unless_asked_for() -> None:
    shared = SuffixCache(0)
    shared.add("a", [1, 2, 3])
    assert shared.tokens_of("a") is None


@pytest.mark.parametrize(
    ("second", "most", "heard"),
    [
        ({"tenant": "a"}, 500, True),
        ({"tenant": "b"}, 500, False),
        ({"tenant": "a", "cache_salt": "s"}, 500, False),
        ({"tenant": "a"}, 0, False),
    ],
)
def test_who_asks_again_is_answered_in_fewer_steps(second: dict[str, Any], most: int, heard: bool) -> None:
    """The second time, the whole text is in the suffix cache, but only for the same tenant and without a salt."""
    policy = Policy(OWN_DRAFTERS, 64, 0.0)
    loop = step_loop(TextEngine(20), suffix_cache_tokens=most)
    steps = []
    first: dict[str, Any] = {"tenant": "a"}
    for whose in (first, second):
        client = Client(loop, [2, 3, 4], 60, policy=policy, sampling=SOUND, **whose)
        run(loop, client)
        assert client.tokens == client.want
        steps.append(sum(result.steps for result in client.mail.results))
        sources = [source for result in client.mail.results for source in result.sources]
    assert (steps[1] < steps[0] / 3) is heard
    assert (sources.count(NGRAM) > 40) is heard


def test_a_repeated_seed_still_follows_the_target_under_rejection() -> None:
    """Candidates from the same seed's earlier draws would depend on the random numbers that decide about them. The
    false-alarm probability is 10^-6."""
    loop = step_loop(TextEngine(40), suffix_cache_tokens=4000)
    prompt = [*([2, 3, 4, 5, 6, 7, 8, 9] * 8), 10]  # its last token has no earlier occurrence
    policy = Policy(frozenset({CandidateSource.NGRAM}), 8, 0.0, forced=True)
    logits = LANGUAGE.logits(LANGUAGE.number_of(prompt)).astype(float)
    target = np.exp(logits - logits.max())
    target[BAD] = 0.0
    target /= target.sum()
    counts = np.zeros(len(target))
    for seed in range(300):
        sampling = Sampling(temperature=1.0, seed=seed, banned_tokens=frozenset({BAD}))
        for repeated in (False, True):
            client = Client(loop, prompt, 2, sampling=sampling, rule=Rule.REJECTION, policy=policy)
            run(loop, client)
            counts[client.tokens[0]] += repeated
    likely = target > 0.01
    found = [*counts[likely], counts[~likely].sum()]
    wanted = 300 * np.array([*target[likely], target[~likely].sum()])
    assert chisquare(found, wanted).pvalue > 1e-6


def test_the_longest_match_of_all_texts_is_the_candidate_under_rejection() -> None:
    """In a tree with draws, one candidate alone has each place."""
    shared = np.array([*range(100, 116), 200, 201], dtype=np.int32)
    tree = TokenTree([115, 99, *range(100, 116)], vocabulary=300, last_position=500, sampled=True)
    ngrams = SessionNgrams(tree.committed, 500, RequestSampler(Sampling()))
    ngrams.propose(tree, 0.0, shared, every=True, sampled=True)
    assert list(tree.root.children) == [200]


@pytest.mark.parametrize(
    ("second", "most", "shared"),
    [
        ({"tenant": "a"}, 500, True),
        ({"tenant": "b"}, 500, False),
        ({"tenant": "a", "cache_salt": "s"}, 500, False),
        ({"tenant": "a"}, 0, False),
    ],
)
def test_a_tenants_texts_share_what_their_windows_found(second: dict[str, Any], most: int, shared: bool) -> None:
    """With lookups off, a text without a window has candidates only from the windows of earlier texts."""
    drafters = frozenset({CandidateSource.LOOKAHEAD})
    loop = step_loop(TextEngine(20), suffix_cache_tokens=most)
    sources: list[int] = []
    first: dict[str, Any] = {"tenant": "a"}
    for whose, window in ((first, Lookahead(3, 3, 3)), (second, None)):
        policy = Policy(drafters, 64, 0.0, lookahead=window)
        client = Client(loop, [2, 3, 4], 60, policy=policy, sampling=SOUND, knows_its_tenant=True, **whose)
        run(loop, client)
        assert client.tokens == client.want
        sources = [source for result in client.mail.results for source in result.sources]
    assert (sources.count(LOOKAHEAD) > 4) is shared
