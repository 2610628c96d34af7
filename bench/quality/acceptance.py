"""Measure acceptance and tokens per step, by rule, tree and temperature, and the bounds on acceptance.

    python -m bench acceptance

Draft and verifier sessions of the real services alternate in this process, so nothing depends on timing: the draft
expands its tree as far as that pays, then a step verifies the best nodes. The demo pair continues held-out prompts.

Acceptance is counted per position with a tested candidate. Its bounds are computed on the same texts: no test of one
candidate alone can exceed 1 - TV(p, q); sampling with shared noise reaches at least (1 - TV) / (1 + TV) (Daliri, Musco,
Suresh 2024). REJECTION verifies chains as blocks (Sun et al. 2024) and, for comparison, one candidate at a time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench import markdown
from bench.arguments import limit, parser_of
from bench.systems import pair
from demo.prompts import held_out
from draft_service.candidate_queue import Extension
from draft_service.draft_loop import DraftLoop, ServedSession
from draft_service.language_model import LanguageModelDrafter
from draft_service.request import DrafterSessionRequest, ExpansionPolicy
from draft_service.session import DrafterSession
from specdec.decoding.calibration import Calibration
from specdec.decoding.query import RequestSampler
from specdec.decoding.sampling import Rule, Sampling
from specdec.decoding.speculation import CandidateSource
from specdec.decoding.step_logits import HostLogits
from specdec.engine.engines.loading import load_engine
from specdec.engine.kv.blocks import BlockPool
from specdec.engine.model_directory import ModelDirectory
from specdec.engine.placement import Placement
from testing.mailbox import Handed
from verifier_service.backend.request import Policy, VerifierSessionRequest
from verifier_service.backend.result import CORRECTION
from verifier_service.sessions.session import VerifierSession
from verifier_service.verification.tree_verification import TreeVerification, verify_trees

REMOTE = frozenset({CandidateSource.REMOTE})

CAPACITY = 4096
TREE_SLOTS = 256
CREDIT = 64
"""Limit on a draft's live nodes; the verifier takes the best of them."""


@dataclass(frozen=True)
class Shape:
    name: str
    nodes: int
    depth: int
    branches: int


SHAPES = (
    Shape("chain of 4", 4, 4, 1),
    Shape("chain of 8", 8, 8, 1),
    Shape("tree of 16", 16, 8, 3),
    Shape("tree of 32", 32, 12, 3),
)


TESTS = (
    ("COUPLED", Rule.COUPLED, False),
    ("REJECTION", Rule.REJECTION, True),
    ("REJECTION, one by one", Rule.REJECTION, False),
)
"""Rules by name, and whether chains are verified as blocks."""


@dataclass
class Count:
    tokens: int = 0
    steps: int = 0
    accepted: int = 0
    rejected: int = 0

    @property
    def acceptance(self) -> float:
        return self.accepted / max(1, self.accepted + self.rejected)

    @property
    def tokens_a_step(self) -> float:
        return self.tokens / max(1, self.steps)


class Pair:
    """A target and a draft that alternate."""

    def __init__(self, target: Path, draft: Path) -> None:
        directories = ModelDirectory(target), ModelDirectory(draft)
        self.target, self.draft = (
            load_engine(directory, Placement(kv_tokens=CAPACITY), threads=(1,)) for directory in directories
        )
        self.context = directories[0].context

    def run(
        self,
        prompt: list[int],
        sampler: RequestSampler,
        shape: Shape,
        tokens: int,
        calibration: Calibration,
        *,
        blocks: bool = True,
    ) -> Text:
        growing = DrafterSessionRequest(prompt, [], sampler, frozenset(), tokens, self.context)
        policy = ExpansionPolicy(CREDIT if shape.branches > 1 else shape.nodes, shape.depth, shape.branches)
        draft = DrafterSession(growing, policy, self.draft.vocabulary, calibration)
        wanted = VerifierSessionRequest(prompt, [], sampler, frozenset(), tokens, None, self.context)
        verifier = VerifierSession(
            wanted, Policy(REMOTE, shape.nodes, 0.0), CREDIT, self.target.vocabulary, block_verification=blocks
        )
        pushed: list[Extension] = []

        def fail(error: Exception) -> None:
            raise error

        loop = DraftLoop(LanguageModelDrafter(self.draft))
        loop.attach(ServedSession(draft, Handed(pushed.append, fail), lambda extension: extension))
        verifier.allocate(BlockPool((CAPACITY - TREE_SLOTS) // 64))
        count = Count()
        while True:
            while draft.best_logprob() > -math.inf:
                loop.turn()
            for extension in pushed:
                verifier.extend(extension.base, extension.paths, 0.0)
            pushed.clear()
            base, finished = verifier.tree.base, self._step(verifier, count)
            if finished:
                return Text(verifier.tree.committed, count)
            loop.commit(draft, base, verifier.tree.committed[base:], time.monotonic())

    def _step(self, session: VerifierSession, count: Count) -> bool:
        """Verify all candidates in one step; return True if the text has ended."""
        nodes = session.candidates().nodes
        assert session.table is not None
        session.table.reserve(max([session.tree.base, *(node.position + 1 for node in nodes)]))
        packer = self.target.packer()
        tree_slots = list(range(CAPACITY - TREE_SLOTS, CAPACITY))
        planned = session.plan(packer, session.remaining_prompt + 1, nodes, tree_slots)
        verification = TreeVerification(session, planned)
        verify_trees([verification], HostLogits(self.target.forward(packer.pack())))
        if verification.error is not None:
            raise verification.error
        if verification.kv_copies:
            self.target.copy(*np.asarray(verification.kv_copies).T)
        result = verification.commit_result(0.0)
        count.tokens += len(result.tokens)
        count.steps += 1
        count.accepted += result.accepted
        count.rejected += result.sources.count(CORRECTION)
        return bool(result.finish)

    def distance(self, text: list[int], prompt: int, temperature: float) -> NDArray[np.float64]:
        """Return TV(p, q) at each generated position of a text."""
        p, q = (_probabilities(_logits(engine, text, prompt), temperature) for engine in (self.target, self.draft))
        return np.asarray(0.5 * np.abs(p - q).sum(axis=1))


@dataclass(frozen=True)
class Text:
    tokens: list[int]
    count: Count


def _logits(engine: object, text: Sequence[int], prompt: int) -> NDArray[np.float32]:
    packer = engine.packer()  # type: ignore[attr-defined]
    slots = np.arange(1, len(text))
    rows = packer.add_rows(list(text[:-1]), 0, slots)
    packer.add_path(slots, rows)
    for row in rows[prompt - 1 :]:
        packer.want(row)
    logits: NDArray[np.float32] = engine.forward(packer.pack())  # type: ignore[attr-defined]
    return logits[: len(text) - prompt]


def _probabilities(logits: NDArray[np.float32], temperature: float) -> NDArray[np.float64]:
    z = logits.astype(np.float64) / temperature
    z = np.exp(z - z.max(axis=1, keepdims=True))
    return np.asarray(z / z.sum(axis=1, keepdims=True))


def main(given: Sequence[str]) -> None:
    parser = parser_of("acceptance", __doc__)
    pair.add(parser)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    args = parser.parse_args(given)
    limit(parser, args, 1, "prompts", "tokens")
    models = Pair(*pair.both(parser, args))
    prompts = held_out(args.prompts)
    print(markdown.head(["T", "rule", "tree", "acceptance", "tokens a step", "bounds (1-TV)/(1+TV), 1-TV"]))
    for temperature in (0.0, 0.7, 1.0):
        for name, rule, blocks in TESTS:
            for shape in SHAPES:
                if rule is Rule.REJECTION and not temperature:
                    continue  # it equals COUPLED
                calibration, total, distances = Calibration(), Count(), []
                for seed, prompt in enumerate(prompts):
                    sampler = RequestSampler(Sampling(temperature=temperature, seed=seed), rule=rule)
                    text = models.run(prompt, sampler, shape, args.tokens, calibration, blocks=blocks)
                    total = replace(total, **{key: n + getattr(text.count, key) for key, n in vars(total).items()})
                    if temperature:
                        distances.append(models.distance(text.tokens, len(prompt), temperature))
                bounds = ""
                if distances:
                    tv = np.concatenate(distances)
                    bounds = f"{np.mean((1 - tv) / (1 + tv)):.3f}, {np.mean(1 - tv):.3f}"
                cells = [f"{temperature:g}", name, shape.name, f"{total.acceptance:.3f}", f"{total.tokens_a_step:.2f}"]
                print(markdown.row([*cells, bounds]), flush=True)
