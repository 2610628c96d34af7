"""REJECTION in the token trees of a session's steps: chains of draws are verified as blocks, siblings level by level.
Only some of the candidates have rows.

Chi-square tests of the joint distribution of all tokens, with false-alarm probability FALSE_ALARM, on fixed seeds. A
negative control must fail them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from specdec.decoding.noise import text_hash
from specdec.decoding.proposal import DraftDistribution
from specdec.decoding.query import RequestSampler, SamplingQuery
from specdec.decoding.rejection import acceptances, propose
from specdec.decoding.sampling import Rule, Sampling
from specdec.decoding.speculation import CandidateSource
from specdec.decoding.step_logits import HostLogits
from specdec.decoding.tree import Paths
from specdec.engine.cpu.layout import RaggedPacker
from specdec.engine.kv.blocks import BlockPool
from tests.decoding.small_models import (
    DRAFT_OF_PAPER,
    FALSE_ALARM,
    LENGTH,
    TARGET_OF_PAPER,
    VOCABULARY,
    Model,
    Path,
    logits_of,
    model,
    pvalue,
)
from tests.verifier_service.fakes import BAD, TextEngine, step_loop
from tests.verifier_service.step_loop.helpers import WARM, client
from verifier_service.backend.request import Policy, VerifierSessionRequest
from verifier_service.backend.result import BONUS, CORRECTION, REMOTE_DRAFT, StepSeconds, VerifyResult
from verifier_service.backend.stats import LAST_BIN, VerifierStats
from verifier_service.sessions.session import VerifierSession
from verifier_service.verification.tree_verification import TreeVerification, verify_trees

PROMPT = [0, 1]
TREE_SLOTS = list(range(500, 540))
FEW, MANY = 400, 4000

P, Q = model(1, VOCABULARY), model(2, VOCABULARY)

Shape = tuple[int, ...]
"""Draws at each depth."""

Rows = Callable[[int, VerifierSession], int]
"""Function of run `seed` and its session: the number of candidates with rows in the next step."""


def session_of(seed: int, *, blocks: bool = True, vocabulary: int = VOCABULARY) -> VerifierSession:
    sampler = RequestSampler(Sampling(temperature=1.0, seed=seed), rule=Rule.REJECTION)
    request = VerifierSessionRequest(PROMPT, [], sampler, frozenset(), 40, None, 256)
    policy = Policy(frozenset({CandidateSource.REMOTE}), 32, 0.0)
    session = VerifierSession(request, policy, 64, vocabulary, block_verification=blocks)
    session.allocate(BlockPool(2))
    session.computed = session.tree.base - 1
    return session


def drawn(session: VerifierSession, q: Model, shape: Shape) -> Paths:
    """Return the tree that a draft grows below the text."""
    text = session.tree.committed
    tokens, parents, logprobs, rows = list[int](), list[int](), list[float](), []
    below: list[tuple[int, Path]] = [(0, ())]
    for width in shape:
        nodes: list[tuple[int, Path]] = []
        for parent, path in below:
            sampler, position = session.request.sampler, len(text) + len(path)
            query = SamplingQuery(sampler, position, text_hash=text_hash(text, path))
            proposal = propose(logits_of(q((*text[len(PROMPT) :], *path))), query, width)
            assert proposal is not None
            rows.append((parent, proposal.row))
            for token, probability in zip(proposal.tokens, acceptances(proposal.row, width), strict=False):
                tokens.append(token)
                parents.append(parent)
                logprobs.append(math.log(probability))
                nodes.append((len(tokens), (*path, token)))
        below = nodes
    return Paths(tokens, parents, logprobs, rows)


def step(session: VerifierSession, p: Model, rows: int) -> VerifyResult:
    """Run a step with the target's distributions `p`, and rows for the first `rows` candidates."""
    nodes, packer = session.candidates().nodes[:rows], RaggedPacker()
    planned = session.plan(packer, 1, nodes, list(TREE_SLOTS))
    assert planned.root_row is not None
    paths: dict[int, Path] = {planned.root_row: ()}
    if planned.tree is not None:
        paths |= {planned.tree.results[id(n)]: tuple(node.token for node in n.path()) for n in nodes}
    text = session.tree.committed[len(PROMPT) :]
    logits = np.stack([logits_of(p((*text, *paths[row]))) for row in range(len(packer.wanted))])
    verification = TreeVerification(session, planned)
    verify_trees([verification], HostLogits(logits))
    assert verification.error is None
    result = verification.commit_result(0.0)
    assert len(result.tokens) == len(result.sources) == result.accepted + 1
    assert session.computed == session.tree.base - 1
    return result


def some(seed: int, session: VerifierSession) -> int:
    return (seed + session.tree.base) % 4


def run(
    seed: int,
    shape: Shape,
    rows: Rows = some,
    p: Model = P,
    q: Model = Q,
    *,
    blocks: bool = True,
    vocabulary: int = VOCABULARY,
) -> Path:
    """Generate LENGTH tokens."""
    session = session_of(seed, blocks=blocks, vocabulary=vocabulary)
    while session.generated < LENGTH:
        session.extend(session.tree.base, drawn(session, q, shape), 0.0)
        step(session, p, rows(seed, session))
    return tuple(session.tree.committed[len(PROMPT) :][:LENGTH])


SHAPES = {"chain": (1, 1, 1), "siblings": (3, 2), "below-a-chain": (1, 2, 1), "above-chains": (2, 1, 1)}


@pytest.mark.parametrize("blocks", [True, False], ids=["block", "token"])
@pytest.mark.parametrize(
    ("shape", "runs"),
    [
        *(pytest.param(shape, MANY, id=f"{name}-many", marks=pytest.mark.verify) for name, shape in SHAPES.items()),
        *(pytest.param(SHAPES[name], FEW, id=name) for name in ("chain", "below-a-chain")),
    ],
)
def test_tokens_follow_the_target(shape: Shape, runs: int, blocks: bool) -> None:
    counts = Counter(run(seed, shape, blocks=blocks) for seed in range(runs))
    assert pvalue(counts, P) > FALSE_ALARM


def if_the_second_draw_is_good(_: int, session: VerifierSession) -> int:
    """Invalid for blocks: the number of rows decides where the block ends, but depends on a draw beyond that end."""
    chain = session.tree.best(2)
    return int(len(chain) == 2 and chain[1].token == 1)


@pytest.mark.verify
def test_rows_that_depend_on_a_draw_behind_them_are_found_out() -> None:
    """Negative control. It does not bias draws tested one by one: each is tested, in this step or a later one."""
    p, q = TARGET_OF_PAPER, DRAFT_OF_PAPER

    def tested(blocks: bool) -> float:
        runs = (run(seed, (1, 1), if_the_second_draw_is_good, p, q, blocks=blocks, vocabulary=2) for seed in range(800))
        return pvalue(Counter(runs), p, LENGTH, 2)

    assert tested(blocks=False) > FALSE_ALARM
    assert tested(blocks=True) < FALSE_ALARM


def first_step(seed: int, *, blocks: bool = True) -> tuple[list[int], VerifyResult]:
    """Return a chain of three draws and the result of a step with all its rows."""
    session = session_of(seed, blocks=blocks)
    paths = drawn(session, Q, (1, 1, 1))
    session.extend(len(PROMPT), paths, 0.0)
    return list(paths.tokens), step(session, P, 3)


def test_what_a_block_accepts_counts_whatever_single_tests_would_have_said() -> None:
    """Some blocks accept draws whose first single test fails; some reject draws whose single tests all succeed."""
    results: list[VerifyResult] = []
    against, rejected_all_the_same = 0, 0
    for seed in range(FEW):
        draws, result = first_step(seed)
        results.append(result)
        alone = first_step(seed, blocks=False)[1].accepted
        against += alone == 0 < result.accepted
        rejected_all_the_same += result.accepted < alone
        assert result.tokens[: result.accepted] == draws[: result.accepted]
        assert result.sources[: result.accepted] == [REMOTE_DRAFT] * result.accepted
        assert result.sources[-1] == (BONUS if result.accepted == len(draws) else CORRECTION)
    assert against > 5
    assert rejected_all_the_same > 5
    stats = VerifierStats()
    stats.observe(0, StepSeconds(), results)
    lengths = Counter(result.accepted for result in results)
    assert stats.accepted_lengths == [lengths[length] for length in range(LAST_BIN + 1)]
    assert stats.accepted == sum(result.accepted for result in results)


def test_draws_compared_with_those_of_other_texts_are_tested_one_by_one() -> None:
    """This holds for a step divided among tenants, and for later ones until the text is past these draws."""
    for seed in range(50):
        session = session_of(seed)
        session.extend(len(PROMPT), drawn(session, Q, (1, 1, 1)), 0.0)
        assert session.verifies_blocks
        session.compare_candidates()
        assert not session.verifies_blocks
        assert step(session, P, 3).tokens == first_step(seed, blocks=False)[1].tokens
        while session.generated < LENGTH:
            assert not session.verifies_blocks
            step(session, P, 0)
        assert session.verifies_blocks


@pytest.mark.parametrize(("tenants", "blocks"), [(("a", "a"), True), (("a", "b"), False)])
def test_a_step_divided_among_tenants_compares_draws(tenants: tuple[str, str], blocks: bool) -> None:
    loop = step_loop(TextEngine(60))
    policy = Policy(frozenset({CandidateSource.REMOTE}), 8, 0.0, forced=True)
    texts = [
        client(loop, seed=seed, sampling=WARM, rule=Rule.REJECTION, policy=policy, tenant=tenant)
        for seed, tenant in enumerate(tenants)
    ]
    loop.turn()  # the prompts
    row = DraftDistribution(np.arange(2, BAD), np.ones(BAD - 2, np.float16))
    chain = Paths([3] * 6, range(6), [-0.1] * 6, [(parent, row) for parent in range(6)])
    for text in texts:
        text.session.extend(text.session.tree.base, chain, 0.0)
    loop.turn()
    assert all(text.session.verifies_blocks for text in texts) == blocks


def test_the_same_seed_and_candidates_give_the_same_tokens() -> None:
    for seed in range(50):
        assert run(seed, (1, 2, 1)) == run(seed, (1, 2, 1))
