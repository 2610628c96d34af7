"""Speculation at a chosen acceptance, for models with random weights. Reports label its results SYNTHETIC.

A model with random weights has no draft that predicts it. So plain decoding first finds its choices. Then the same
texts are decoded again with injected chains of candidates: each token is the target's choice with probability
`acceptance`, else another token. Below a wrong token the rest of the chain is useless, as a draft's would be. The loop
is the verifier's own (`StepLoop`), with its schedule, tree verification and memory. Drafts, messages and processes are
left out, so the result is an upper bound on speculation with this engine.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specdec.decoding.query import RequestSampler
from specdec.decoding.sampling import Sampling
from specdec.decoding.speculation import NO_DRAFTERS, CandidateSource
from specdec.decoding.tree import Paths
from specdec.engine.engine import Engine
from specdec.engine.working_memory import MAX_STEP_CANDIDATES
from testing.mailbox import Mailbox
from verifier_service.backend.request import Policy, VerifierSessionRequest
from verifier_service.costs.step_latency import StepLatency
from verifier_service.sessions.running_session import RunningSession
from verifier_service.sessions.session import VerifierSession
from verifier_service.step_loop import StepLoop

MAX_OWN_NODES = 256


@dataclass
class Outcome:
    """The result of a run. `tokens`, `seconds` and `steps` cover the time in which all sessions decoded: every prompt
    computed, no text finished."""

    tokens: int
    seconds: float
    steps: int
    offered: int  # candidates verified, over whole texts
    accepted: int
    texts: list[list[int]]

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class _Stream:
    """A session of the step loop, and the results read from it."""

    def __init__(self, loop: StepLoop, prompt: Sequence[int], length: int, vocabulary: int, width: int) -> None:
        request = VerifierSessionRequest(
            list(prompt), [], RequestSampler(Sampling(), frozenset()), frozenset(), length, None, loop.context
        )
        policy = Policy(
            frozenset({CandidateSource.REMOTE}) if width else NO_DRAFTERS,
            max_candidates=width,
            patience=0.0,
            forced=True,
        )
        self.session = VerifierSession(request, policy, MAX_OWN_NODES, vocabulary)
        self.mail = Mailbox()
        self.tokens: list[int] = []
        self.offered = self.accepted = 0
        self._read = 0  # verify results read so far
        loop.enqueue(RunningSession(self.session, self.mail))

    @property
    def over(self) -> bool:
        return bool(self.mail.finish)

    def read(self) -> None:
        if self.mail.error is not None:
            raise self.mail.error
        for result in self.mail.results[self._read :]:
            self.tokens += result.tokens
            self.offered += result.offered
            self.accepted += result.accepted
        self._read = len(self.mail.results)
        self.session.consumed = self.session.tree.base

    def offer(self, text: Sequence[int], acceptance: float, width: int, vocabulary: int, dice: random.Random) -> None:
        """Send a chain of `width` candidates below the committed text."""
        chain = candidates(text[len(self.tokens) :][:width], acceptance, vocabulary, dice)
        if chain:
            scores = [math.log(acceptance)] * len(chain)
            self.session.extend(self.session.tree.base, Paths(chain, range(len(chain)), scores), time.monotonic())


def candidates(right: Sequence[int], acceptance: float, vocabulary: int, dice: random.Random) -> list[int]:
    """Return candidates: each is the right token with probability `acceptance`, else another one."""
    return [
        token if dice.random() < acceptance else (token + 1 + dice.randrange(vocabulary - 1)) % vocabulary
        for token in right
    ]


def decode(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    length: int,
    *,
    acceptance: float = 1.0,
    width: int = 0,
    texts: Sequence[Sequence[int]] = (),
    seed: int = 0,
    cost: StepLatency | None = None,
) -> Outcome:
    """Decode `length` tokens after each prompt, with `width` candidates per session and step made from `texts`."""
    loop = StepLoop(engine, latency=cost)
    dice = random.Random(seed)
    streams = [_Stream(loop, prompt, length, engine.vocabulary, width) for prompt in prompts]
    begun: float | None = None
    ended, seconds = False, 0.0
    counted = before = steps_before = steps = 0
    while not all(stream.over for stream in streams):
        for stream, text in zip(streams, texts, strict=False):
            if not stream.over and not stream.session.remaining_prompt:
                stream.offer(text, acceptance, width, engine.vocabulary, dice)
        if loop.turn() is None:
            raise RuntimeError("some sessions are unfinished, and the loop has no work")
        for stream in streams:
            stream.read()
        written = sum(len(stream.tokens) for stream in streams)
        if begun is None and all(stream.tokens for stream in streams):
            begun, before, steps_before = time.perf_counter(), written, loop.stats.steps
        if begun is not None and not ended:
            counted, seconds, steps = written - before, time.perf_counter() - begun, loop.stats.steps - steps_before
            ended = any(stream.over for stream in streams)
    return Outcome(
        tokens=counted,
        seconds=seconds,
        steps=steps,
        offered=sum(stream.offered for stream in streams),
        accepted=sum(stream.accepted for stream in streams),
        texts=[stream.tokens for stream in streams],
    )


def measure(
    engine: Engine, *, acceptance: float, widths: Sequence[int], sessions: int, prompt: int, length: int, rounds: int
) -> list[dict[str, Any]]:
    """Return the median tokens a second of plain decoding and of each width; every round measures each once."""
    prompts = [[1 + (7 * session + i) % (engine.vocabulary - 1) for i in range(prompt)] for session in range(sessions)]
    cost = StepLatency.measure(engine, engine.capacity - MAX_STEP_CANDIDATES)  # once: the loops keep correcting it
    texts = decode(engine, prompts, length, cost=cost).texts
    outcomes: dict[int, list[Outcome]] = {}
    for number in range(rounds):
        for width in (0, *widths):
            injected: dict[str, Any] = {"acceptance": acceptance, "width": width, "texts": texts, "seed": number}
            outcomes.setdefault(width, []).append(decode(engine, prompts, length, cost=cost, **injected))
    plain = statistics.median(outcome.rate for outcome in outcomes[0])
    rows = []
    for width, runs in outcomes.items():
        rate = statistics.median(outcome.rate for outcome in runs)
        rows.append(
            {
                "sessions": sessions,
                "width": width,
                "tokens_per_second": rate,
                "over_plain": rate / plain,
                "tokens_per_step": sum(o.tokens for o in runs) / sum(o.steps for o in runs) / sessions,
                "verified": sum(o.offered for o in runs),
                "accepted": sum(o.accepted for o in runs),
                "same_tokens": all(o.texts == texts for o in runs),
            }
        )
    return rows
