"""Losses of a draft's training, and acceptance of its guesses, compared with sums written out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from specdec.training.divergences import NAMES, ROWS, Loss, acceptance, coupled, divergence, overruled

P, Q = [0.5, 0.3, 0.2, 0.0], [0.1, 0.6, 0.2, 0.1]


def by_hand(loss: Loss, p: list[float], q: list[float]) -> float:
    pairs = list(zip(p, q, strict=True))
    match loss:
        case "forward":
            return sum(a * math.log(a / b) for a, b in pairs if a)
        case "reverse":
            return sum(b * (math.log(b) - (math.log(a) if a else -100.0)) for a, b in pairs)
        case "jsd":
            middle = [(a + b) / 2 for a, b in pairs]
            return sum(
                0.5 * ((a * math.log(a / m) if a else 0.0) + b * math.log(b / m))
                for (a, b), m in zip(pairs, middle, strict=True)
            )
        case "tv":
            return 0.5 * sum(abs(a - b) for a, b in pairs)


@pytest.mark.parametrize("loss", list(NAMES))
def test_a_divergence_is_that_of_its_formula(loss: Loss) -> None:
    """One token has the log-probability -inf in the target."""
    log_p, log_q = torch.tensor([P, Q]).log(), torch.tensor([Q, Q]).log().requires_grad_()
    found = divergence(loss, log_p, log_q)
    assert found.tolist() == pytest.approx([by_hand(loss, P, Q), 0.0], abs=1e-5)
    found.sum().backward()  # type: ignore[no-untyped-call]
    assert log_q.grad is not None
    assert bool(log_q.grad.isfinite().all())


@pytest.mark.parametrize("loss", list(NAMES))
def test_a_divergence_pulls_the_draft_to_the_target(loss: Loss) -> None:
    """A small step against the gradient makes the divergence smaller, for any pair of distributions."""
    logits = torch.randn(2, 50, 8, generator=torch.Generator().manual_seed(0))
    log_p, free = logits[0].log_softmax(-1), logits[1].clone().requires_grad_()
    before = divergence(loss, log_p, free.log_softmax(-1))
    before.sum().backward()  # type: ignore[no-untyped-call]
    assert free.grad is not None
    after = divergence(loss, log_p, (free.detach() - 0.01 * free.grad).log_softmax(-1))
    assert bool((after < before).all())


def test_a_place_is_overruled_where_the_likeliest_tokens_differ() -> None:
    log_p, log_q = torch.tensor([[P, P, Q]]).log(), torch.tensor([[Q, P, Q]]).log()
    assert overruled(log_p, log_q).tolist() == [[True, False, False]]


def coupled_by_hand(p: Tensor, q: Tensor) -> float:
    """Return the double sum of docs/acceptance-rules.md."""
    found = 0.0
    for a, b in zip(p.tolist(), q.tolist(), strict=True):
        if a and b:
            found += 1 / sum(max(c / a, d / b) for c, d in zip(p.tolist(), q.tolist(), strict=True))
    return found


@given(
    st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), min_size=2, max_size=12).filter(
        lambda pairs: all(sum(pair[side] for pair in pairs) > 0.01 for side in (0, 1))
    )
)
def test_the_acceptance_of_coupled_is_that_of_its_formula(pairs: list[tuple[float, float]]) -> None:
    rows = torch.tensor(pairs, dtype=torch.float64).T
    p, q = rows / rows.sum(-1, keepdim=True)
    found = coupled(p[None], q[None]).item()
    assert found == pytest.approx(coupled_by_hand(p, q), abs=1e-9)
    kept = torch.minimum(p, q).sum().item()  # 1 - TV
    assert kept / (2 - kept) - 1e-9 <= found <= kept + 1e-9


def test_the_acceptance_of_coupled_is_what_shared_noise_gives() -> None:
    """With 40,000 draws, a right figure is off by five standard deviations, 0.0125, once in two million runs."""
    p, q = torch.tensor(P, dtype=torch.float64), torch.tensor(Q, dtype=torch.float64)
    uniform = torch.rand(40_000, len(P), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    noise = -(-uniform.log()).log()
    same = ((p.log() + noise).argmax(-1) == (q.log() + noise).argmax(-1)).double().mean().item()
    assert same == pytest.approx(coupled(p[None], q[None]).item(), abs=0.0125)
    assert abs(same - torch.minimum(p, q).sum().item()) > 0.0125  # the bound 1 - TV would fail this test


def test_acceptance_is_measured_row_by_row() -> None:
    logits = torch.randn(2, 2 * ROWS + 3, 20, generator=torch.Generator().manual_seed(1))
    log_p, log_q = logits.log_softmax(-1)
    found = acceptance(log_p, log_q)
    assert found.shape == (2 * ROWS + 3, 3)
    assert torch.equal(found[-1:], acceptance(log_p[-1:], log_q[-1:]))
    assert found[:, 0].tolist() == (log_p.argmax(-1) == log_q.argmax(-1)).double().tolist()
    torch.testing.assert_close(found[:, 2], torch.minimum(log_p.double().exp(), log_q.double().exp()).sum(-1))
    torch.testing.assert_close(acceptance(log_p, log_p), torch.ones_like(found), atol=1e-6, rtol=0)
