"""Chooses children for the nodes of a pass by each session's acceptance rule, then adds them to the token trees.

Choosing changes no session, so a device error while rows are being read costs only one pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from draft_service.session import DrafterSession
from specdec.decoding import contrastive, rejection
from specdec.decoding.calibration import corrected
from specdec.decoding.candidates import Candidates, QueriedRow, draft_candidates
from specdec.decoding.draft_logits import DraftLogits
from specdec.decoding.processing import MAX_ABS_LOGIT, Logits
from specdec.decoding.proposal import DraftDistribution, Proposal
from specdec.decoding.sampling import Rule
from specdec.decoding.tree import Node


class Computed(NamedTuple):
    """A node computed by a pass, and its row of logits."""

    session: DrafterSession
    node: Node
    row: QueriedRow


class Chosen(NamedTuple):
    """The children chosen after a pass.

    `by_whole_rows`: a node's draws (REJECTION) or distribution (CONTRASTIVE), the error that ends its session, or None.
    `candidates`: the children of the `expanded` nodes, in COUPLED and CONTRASTIVE sessions.
    """

    by_whole_rows: list[tuple[Computed, Proposal | DraftDistribution | Exception | None]]
    expanded: list[Computed]
    candidates: Candidates | None


def chosen(computed: Sequence[Computed], logits: DraftLogits) -> Chosen:
    """Choose children from a pass's logits, with one `draft_candidates` call for all `expanded` nodes."""
    whole = [node for node in computed if node.session.request.sampler.rule is not Rule.COUPLED]
    rows = logits.whole([node.row.number for node in whole]) if whole else []
    by_whole_rows = [(node, _by_whole_row(node, row)) for node, row in zip(whole, rows, strict=True)]
    expanded = [node for node in computed if node.session.request.sampler.rule is not Rule.REJECTION]
    width = max((session.width(node) for session, node, _ in expanded), default=0)
    candidates = draft_candidates(logits, [node.row for node in expanded], width) if expanded else None
    return Chosen(by_whole_rows, expanded, candidates)


def give(children: Chosen) -> dict[DrafterSession, Exception]:
    """Add chosen children to their nodes. Return the sessions that cannot continue, with the reason."""
    failed: dict[DrafterSession, Exception] = {}
    for (session, node, _), found in children.by_whole_rows:
        try:
            match found:
                case Exception():
                    failed[session] = found
                case Proposal(tokens=tokens, row=distribution):
                    session.add_draws(node, tokens, distribution)
                case DraftDistribution():
                    session.add_distribution(node, found)
        except Exception as error:  # an error of one session must not end the others
            failed[session] = error
    if children.candidates is not None:
        nodes = [(session, node) for session, node, _ in children.expanded]
        failed |= add_children(nodes, children.candidates.tokens, children.candidates.logprobs)
    return failed


def add_children(
    nodes: Sequence[tuple[DrafterSession, Node]], tokens: NDArray[np.int64], logprobs: NDArray[np.float64]
) -> dict[DrafterSession, Exception]:
    """Add children to nodes of sessions: tokens and logprobs, [n, width] each, the likeliest first, padded with a
    logprob of -inf. Return the sessions that cannot continue, with the reason."""
    failed: dict[DrafterSession, Exception] = {}
    calibrated = corrected([session.shifts(node) for session, node in nodes], logprobs)
    for (session, node), own_tokens, own_logprobs in zip(nodes, tokens.tolist(), calibrated.tolist(), strict=True):
        try:
            session.add_calibrated(node, own_tokens, own_logprobs)
        except Exception as error:  # one session's error does not end the others
            failed[session] = error
    return failed


def _by_whole_row(computed: Computed, logits: Logits) -> Proposal | DraftDistribution | Exception | None:
    """Return a node's draws or distribution under its rule, or the error. A non-finite row gives None, or an error if
    the rule needs the distribution."""
    session, node, (_, query, vocabulary) = computed
    logits = logits[:vocabulary]
    try:
        if not abs(logits.max()) < MAX_ABS_LOGIT:
            required = session.request.distributions_required
            return FloatingPointError("the draft's logits are not finite") if required else None
        if session.request.sampler.rule is Rule.CONTRASTIVE:
            return contrastive.amateur_distribution(logits, session.request.sampler.contrast)
        return rejection.propose(logits, query, session.width(node))
    except Exception as error:  # ends this session only
        return error
