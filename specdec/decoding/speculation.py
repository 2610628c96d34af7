"""How a request speculates: one value, passed unchanged from the client to the step."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import IntEnum

from specdec.decoding.lookahead import Lookahead


class CandidateSource(IntEnum):
    """A source of candidates; numbers as in specdec.v2.Drafter."""

    REMOTE = 1
    NGRAM = 2
    LOOKAHEAD = 3
    LOCAL_MODEL = 4
    HEADS = 5


ALL_DRAFTERS = frozenset(CandidateSource)
OWN_DRAFTERS = ALL_DRAFTERS - {CandidateSource.REMOTE}
"""Drafters inside the verifier."""

NO_DRAFTERS: frozenset[CandidateSource] = frozenset()

RECENT_DRAFTERS = frozenset({CandidateSource.HEADS})
"""Drafters that verifiers of the last version refuse. Orchestrators do not name them for requests that choose no
drafters; verifiers add them. Verifiers must go on to do so for one version after orchestrators begin to name them."""


class Scorer(IntEnum):
    """How a draft scores candidates; numbers as in specdec.v2.DraftScorer."""

    CALIBRATED = 1
    """The path probability, calibrated to the target's acceptance."""
    PROBABILITY = 2
    """The draft's own path probability."""


@dataclass(frozen=True)
class SpeculationOptions:
    """A request's speculation: its drafters and its limits on candidates. For a limit of 0, the services choose one."""

    drafters: frozenset[CandidateSource] = ALL_DRAFTERS
    forced: bool = False  # in every step, even at a loss
    max_candidates: int = 0  # verified per step
    max_depth: int = 0  # tokens verified ahead of the text
    max_branches: int = 0  # alternatives at one position
    max_nodes: int = 0  # live candidates of a draft service
    min_path_probability: float = 0.0  # of nodes that a draft service expands
    scorer: Scorer | None = None  # None: the draft's default
    expansion: tuple[int, ...] = ()  # fixed widths of the draft's token tree, by depth; (): by probability
    lookahead: Lookahead | None = None  # the window for every step; None: a window that pays
    jacobi: bool = False  # only windows with n-grams of 2 tokens
    unspecified: bool = False  # no drafters or window given: the verifier's default

    @property
    def remote(self) -> bool:
        """True if draft services may propose candidates."""
        return CandidateSource.REMOTE in self.drafters


@dataclass(frozen=True)
class Outlook:
    """A verifier's estimate of the gain from a remote draft's candidates for a session at the current load."""

    drafting_wanted: bool = False
    break_even: float = 1.0  # path probability of a candidate that just pays for its row


NO_DRAFT_PAYS = Outlook()


def drafters_of(numbers: Collection[int]) -> frozenset[CandidateSource]:
    """Return the drafters with these numbers. Unknown ones, which newer peers may name, are left out."""
    return frozenset(drafter for drafter in CandidateSource if drafter in numbers)
